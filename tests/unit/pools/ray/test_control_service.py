"""What is said when Ray's control service goes and comes back; any socket that listens stands for it."""

from __future__ import annotations

import socket

from waiting import until

from dpex.pools.agent.nodes import NodeNews
from dpex.pools.ray.control_service import SILENT, ControlService


class Listener:
    def __init__(self) -> None:
        self.heard: list[NodeNews] = []

    def tell(self, news: NodeNews) -> None:
        self.heard.append(news)


def test_its_loss_and_its_return_are_told_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        service, listener = ControlService(address), Listener()
        service.stop()
        service.listen(listener.tell)
        service.knock()
        assert service.answers
    for _ in range(SILENT + 2):
        assert not listener.heard or not service.answers
        service.knock()
    assert not service.answers
    (lost,) = listener.heard
    assert (lost.kind, lost.warning) == ("notice", True)
    assert f"control service at {address} cannot be reached" in lost.why
    with socket.create_server(("127.0.0.1", int(address.rpartition(":")[2]))):
        for _ in range(2):
            service.knock()
        assert service.answers
    assert [news.warning for news in listener.heard] == [True, False]


def test_its_thread_tells_by_itself_and_keeps_nobody_alive() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    service, listener, gone = ControlService(address), Listener(), Listener()
    service.listen(gone.tell)
    service.listen(listener.tell)
    heard = gone.heard
    del gone
    until(lambda: listener.heard)
    service.stop()
    assert not heard
