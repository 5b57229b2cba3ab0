"""Figures of a loader since they were last taken, and the functions that write them to a logger."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dpex.dataloader import DpexDataLoader
from dpex.errors import OptionError
from dpex.integrations.loaders import loader_behind
from dpex.measure.readable import remainder
from dpex.stats import LoaderStats

Write = Callable[[Mapping[str, float], int], None]


class LoaderFigures:
    """The figures of one loader, each time since the last. It keeps the loader alive."""

    def __init__(self, loader: Any) -> None:
        behind = loader_behind(loader)
        if behind is None:
            raise OptionError(
                f"{loader!r} is no DpexDataLoader, and none makes its batches: give a DpexDataLoader, or a loader that "
                "a framework has made from one"
            )
        self.loader: DpexDataLoader[Any] = behind
        self._last = LoaderStats()
        self._pass: Any = None

    def take(self) -> dict[str, float]:
        """Return figures by name, without those that were not measured.

        - ``wait_ratio``: share of the time in which the training loop waited in ``next()``, 0 to 1
        - ``gpu_stall_ratio``: share of the time in which the GPU was idle because data was missing, 0 to 1
        - ``batches_per_s``
        - ``workers``: running workers
        - ``prefetch``: the most batches that are drawn and not yet delivered
        - ``decisions``: number of the tuner's decisions so far
        """
        source, now = self.loader._runtime.last_stats, self.loader.stats()
        is_same = source is self._pass and now.batches >= self._last.batches
        last = self._last if is_same else LoaderStats()  # the counts of each iterator begin at 0
        self._pass, self._last = source, now
        waited_s, worked_s = remainder(now.wait_s, last.wait_s), remainder(now.work_s, last.work_s)
        passed_s = waited_s + worked_s
        found: dict[str, float] = {"decisions": len(self.loader.decisions), "prefetch": now.prefetch}
        found["workers"] = sum(pool.running for pool in now.pools.values())
        if passed_s > 0:
            found["wait_ratio"] = waited_s / passed_s
            found["batches_per_s"] = (now.batches - last.batches) / passed_s
            if now.gpu_stall_s is not None:
                found["gpu_stall_ratio"] = remainder(now.gpu_stall_s, last.gpu_stall_s or 0.0) / passed_s
        prefix = f"dpex/{self.loader.name}" if self.loader.name else "dpex"
        return {f"{prefix}/{name}": float(value) for name, value in found.items()}


def diagnosis_of(loader: Any) -> str:
    """Return the report to print at the end of training; "" where dpex does not make the batches."""
    behind = loader_behind(loader)
    return "" if behind is None else str(behind.diagnose())


def write_to(writer: Any) -> Write:
    """Return a function that writes figures there.

    Raises:
        OptionError: It is no writer of a known kind.
    """
    if hasattr(writer, "add_scalar"):
        return lambda values, step: _to_tensorboard(writer, values, step)
    if callable(getattr(writer, "log", None)):
        return lambda values, step: writer.log(dict(values), step=step)
    if callable(writer):
        return lambda values, step: writer(dict(values), step)
    raise OptionError(
        f"log_to({writer!r}): give a TensorBoard SummaryWriter, a W&B run, or a function of a dict and a step"
    )


def _to_tensorboard(writer: Any, values: Mapping[str, float], step: int) -> None:
    for name, value in values.items():
        writer.add_scalar(name, value, step)


def log_to(writer: Any, *loaders: Any) -> Callable[[int], None]:
    """Return a function that writes figures of the loaders since its last call.

    The names are, below ``dpex/`` and the loader's name: ``wait_ratio``, ``batches_per_s``, ``workers``, ``prefetch``,
    ``decisions``, and with a GPU ``gpu_stall_ratio``.

    Args:
        writer: A TensorBoard ``SummaryWriter``, a W&B run (or the module), or a function of a dict and a step.
        loaders: `DpexDataLoader`s, or loaders that a framework has made from them.

    Returns:
        A function of the step's number, to be called regularly, such as every 100 steps.

    Raises:
        OptionError: The writer is of another kind, or dpex does not make the batches of a loader.

    Examples:
        >>> from dpex import DpexDataLoader, log_to
        >>> loader = DpexDataLoader(range(4), num_workers=1, name="train")
        >>> log = log_to(lambda values, step: print(step, sorted(values)[0]), loader)
        >>> for step, batch in enumerate(loader):
        ...     if step == 3:
        ...         log(step)
        3 dpex/train/batches_per_s
    """
    write, readings = write_to(writer), [LoaderFigures(loader) for loader in loaders]

    def log(step: int) -> None:
        for one in readings:
            write(one.take(), step)

    return log
