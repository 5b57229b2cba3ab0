"""The one door through which tests reach into private attributes of loaders, iterators and tuners.

A test says what it needs by a function of this module, so that a change inside the engine changes this file alone. The
module is not called ``inspect``, because ``tests/`` is on the path and would hide Python's own.
"""

from dataclasses import replace
from typing import Any

from dpex.engine.engine import Engine
from dpex.loader.sizing import Sizing


def iterator_of(loader: Any) -> Any:
    """The iterator that a loader with persistent workers keeps; None before its first epoch."""
    return loader._iterator


def engine_of(iterator: Any) -> Engine:
    """The engine that drives the epoch of an iterator with workers."""
    engine: Engine = iterator._engine
    return engine


def pool_of(iterator: Any, place: str) -> Any:
    """The worker pool of ``place``, "local" or "remote"; None if the engine has not made it yet."""
    return engine_of(iterator).pool(place)


def workers_of(iterator: Any) -> Any:
    """The processes of an iterator, dpex's or torch's, by the number of the worker."""
    return iterator._workers


def reader_of(iterator: Any) -> Any:
    """The iterator that reads the stream of a ``decode_in_workers`` dataset."""
    return iterator._reader


def feed_of(iterator: Any) -> Any:
    """What copies batches to the device; None without a device."""
    return iterator._feed


def pinner_of(iterator: Any) -> Any:
    """The thread that copies batches into pinned memory; None without pinned memory."""
    return engine_of(iterator)._plan.pinner


def gpu_of(iterator: Any) -> Any:
    """What measures the stall of the GPU during an epoch."""
    return engine_of(iterator)._plan.gpu


def measure_gpu_with(iterator: Any, gpu: Any) -> None:
    """Let ``gpu`` stand for what measures the stall of the GPU, in all figures of an epoch."""
    view: Any = engine_of(iterator)._view
    view._plan = replace(view._plan, gpu=gpu)


def tally_of(iterator: Any) -> Any:
    """What adds up the times of the training loop."""
    return engine_of(iterator)._tally


def base_seed_of(iterator: Any) -> Any:
    """The base seed of an epoch, dpex's or torch's."""
    return iterator._base_seed


def shut_down(iterator: Any) -> None:
    """End the workers of an iterator, dpex's or torch's."""
    iterator._shutdown_workers()


def finalize(iterator: Any) -> None:
    """Do what the garbage collector does with an iterator that nobody uses any more."""
    iterator._finalizer()


def lock_of(iterator: Any) -> Any:
    """The lock that a thread holds while it changes the state of the engine."""
    return engine_of(iterator)._lock


def collect(iterator: Any) -> int:
    """Receive the batches that workers have finished; return the number of batches that are ready."""
    engine = engine_of(iterator)
    with engine._lock:
        engine._collect()
    return engine.schedule.ready


def template_pid(iterator: Any) -> int:
    """The pid of the fork server from which the local workers of an iterator are forked."""
    return int(pool_of(iterator, "local")._source._process.pid)


def segments_of(iterator: Any) -> list[Any]:
    """The segments of shared memory through which the local workers of an iterator send batches."""
    return [segment for worker in pool_of(iterator, "local")._workers.values() for segment in worker.segments.values()]


def engines_of(tuner: Any) -> list[Any]:
    """The engines that a tuner watches, the latest last."""
    engines: list[Any] = tuner._engines
    return engines


def tuner_of(loader: Any) -> Any:
    """The tuner of a loader; None if nothing is tuned."""
    return Sizing(loader).tuner()


def settings_of(loader: Any) -> Any:
    """The settings with which the next epoch of a loader begins."""
    return Sizing(loader).current_settings()
