"""Time as an argument, for all folders. Tests pass a clock that they turn by hand."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec, module_from_spec

Clock = Callable[[], float]
"""A function without arguments that returns monotonic seconds."""


def _of_another_instance() -> Clock:
    """Return `time.perf_counter` of an instance of the module ``time`` that only dpex has.

    Tests of users stop or move the clock: freezegun replaces the functions of ``time`` in every module that holds them.
    Waits of dpex end by the time that really passes.
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
