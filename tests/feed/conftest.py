"""A device that copies late, for tests of the feed without a GPU."""

import gc
import threading
from collections.abc import Iterator

import pytest
from async_device import AsyncDevice, pretended

from dpex.device import devices
from dpex.device.devices import QueueDevice


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[AsyncDevice]:
    """Nothing was written where a copy was still to read, and no thread is left.

    A test that provokes a hazard takes it from ``hazards`` once it was seen.
    """
    monkeypatch.setattr(devices, "_locked", {})
    monkeypatch.setattr(QueueDevice, "_refuses_locks", False)
    for made in pretended(monkeypatch):
        yield made
        made.release()
        gc.collect()
        assert made.hazards == []
        assert [thread for thread in threading.enumerate() if thread.name == "dpex-pin"] == []
