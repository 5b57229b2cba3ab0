"""When Ray's control service counts as lost; any socket that listens stands for it."""

from __future__ import annotations

import socket

import pytest

from dpex.pools.ray import control_service
from dpex.pools.ray.control_service import SILENT, ControlService


def test_its_loss_lasts_from_a_few_attempts_without_an_answer_to_the_first_with_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(control_service, "monotonic", iter(range(0, 1000, 2)).__next__)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        service = ControlService(f"127.0.0.1:{port}")
        assert service.answers()
    for _ in range(SILENT):
        assert not service.why_lost()
        assert not service.answers()
    assert f"control service at 127.0.0.1:{port} cannot be reached" in service.why_lost()
    with socket.create_server(("127.0.0.1", port)):
        assert service.answers()
    assert not service.why_lost()


def test_it_is_tried_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_service, "monotonic", lambda: 1.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        service = ControlService(f"127.0.0.1:{server.getsockname()[1]}")
        assert service.answers()
    assert service.answers()
