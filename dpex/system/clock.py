"""The clock that all folders pass as an argument. Tests pass a clock of their own, which they advance."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec, module_from_spec

Clock = Callable[[], float]
"""A function without arguments that returns monotonic seconds."""


def _of_another_instance() -> Clock:
    """Return `time.perf_counter` of a private instance of the module ``time``.

    Users' tests may stop or move the clock: freezegun replaces functions of ``time`` in every module that refers to
    them. Timeouts of dpex must follow real time.
    """
    spec = find_spec("time")
    assert spec is not None
    assert spec.loader is not None
    instance = module_from_spec(spec)
    spec.loader.exec_module(instance)
    clock: Clock = instance.perf_counter
    return clock


monotonic: Clock = _of_another_instance()
"""Return seconds from an arbitrary start. They grow steadily, whatever tests do to the module `time`."""
