"""Scrapes in these tests want to see what happened a moment ago."""

import pytest

from dpex.telemetry.http import site


@pytest.fixture(autouse=True)
def metrics_are_always_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Share no rendered metrics, as with a client that scrapes every few seconds."""
    monkeypatch.setattr(site, "KEPT_S", 0.0)
