"""A loader's part in the exported metrics: its ledger, its place at the endpoint, and in Ray's metrics."""

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
    """The one that is asked for, by a configuration or by ``$DPEX_METRICS_PORT``, so that scripts need not be changed.

    Raises:
        OptionError: the variable is no port.
    """
    if config is not None and config.port is not None:
        return Endpoint(port=config.port, config=config)
    text = environment.get(PORT_VARIABLE, "")
    if not text:
        return None if config is None else Endpoint(port=0, config=config)
    if not (text.isascii() and text.isdigit() and int(text) <= 65535):
        raise OptionError(f"{PORT_VARIABLE}={text!r}: give a port from 1 to 65535, or 0 for one that is free")
    return Endpoint(port=int(text), config=config or MetricsConfig())


class Registration:
    """Of one loader, which it does not keep alive; `end` is called at the latest when the loader dies."""

    def __init__(self, ledger: LoaderMetrics, seat: int | None, mirrored: int | None) -> None:
        self.ledger = ledger
        self._seat = seat
        self._mirrored = mirrored
        self._finalizer: weakref.finalize | None = None  # type: ignore[type-arg]

    @property
    def url(self) -> str | None:
        """Address of the live page that shows the loader, if there is one."""
        return None if self._seat is None else exporter.url

    def end_with(self, loader: object) -> None:
        """End when that dies."""
        self._finalizer = weakref.finalize(loader, _leave, self._seat, self._mirrored)

    def end(self) -> None:
        """Idempotent."""
        if self._finalizer is not None:
            self._finalizer()


def _leave(seat: int | None, mirrored: int | None) -> None:
    if mirrored is not None:
        mirror.leave(mirrored)
    if seat is not None:
        exporter.leave(seat)


def enrol(
    loader: object, config: MetricsConfig | None, name: str | None, info: Sequence[str], *, in_ray: bool
) -> Registration | None:
    """Let this loader's metrics be exported; None: this process never exports any.

    Raises:
        OptionError: see `dpex.telemetry.exporter.Exporter.join` and `endpoint_from`.
    """
    endpoint = endpoint_from(config, os.environ)
    ledger = exporter.ledger(name, info)
    seat = exporter.join(endpoint, ledger) if endpoint is not None else None
    mirrored = mirror.join(ledger) if in_ray else None
    if seat is None and mirrored is None:
        return None
    membership = Registration(ledger, seat, mirrored)
    membership.end_with(loader)
    return membership
