"""A loader's part in the exported metrics: its ledger, its place at the endpoint, and its place in Ray's metrics."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping, Sequence

from dpex.errors import OptionError
from dpex.options import MetricsConfig
from dpex.telemetry.exporter import PORT_VARIABLE, Endpoint, exporter
from dpex.telemetry.loader_metrics import LoaderMetrics
from dpex.telemetry.ray_metrics import mirror


def endpoint_from(config: MetricsConfig | None, environment: Mapping[str, str]) -> Endpoint | None:
    """Return the endpoint that a configuration or ``$DPEX_METRICS_PORT`` asks for; None if neither does.

    Raises:
        OptionError: The variable is not a port.
    """
    text = environment.get(PORT_VARIABLE, "")
    if config is not None and (config.port is not None or not text):
        return Endpoint(port=config.port or 0, config=config)
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and int(text) <= 65535):
        raise OptionError(f"{PORT_VARIABLE}={text!r}: give a port from 1 to 65535, or 0 for a free one")
    return Endpoint(port=int(text), config=config or MetricsConfig())


class Registration:
    """The registration of one loader, which it does not keep alive. It ends by `end`, or when the loader dies."""

    def __init__(self, loader: object, ledger: LoaderMetrics, seat: int | None, mirrored: int | None) -> None:
        self.ledger = ledger
        self._seat = seat
        self.end = weakref.finalize(loader, _leave, seat, mirrored)
        """End it. Idempotent."""

    @property
    def url(self) -> str | None:
        """Return the address of the live page that shows the loader; None if there is no page."""
        return None if self._seat is None else exporter.url


def _leave(seat: int | None, mirrored: int | None) -> None:
    if mirrored is not None:
        mirror.leave(mirrored)
    if seat is not None:
        exporter.leave(seat)


def enrol(
    loader: object, config: MetricsConfig | None, name: str | None, info: Sequence[str], *, in_ray: bool
) -> Registration | None:
    """Export this loader's metrics; None if nothing asks for it or this process never exports.

    Raises:
        OptionError: See `dpex.telemetry.exporter.Exporter.join` and `endpoint_from`.
    """
    endpoint = endpoint_from(config, os.environ)
    ledger = exporter.ledger(name, info)
    seat = exporter.join(endpoint, ledger) if endpoint is not None else None
    mirrored = mirror.join(ledger) if in_ray else None
    return None if seat is None and mirrored is None else Registration(loader, ledger, seat, mirrored)
