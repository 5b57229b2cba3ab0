"""Accelerate: `DpexTracker` writes figures of loaders whenever the script logs, and prints the diagnosis at the end.

It needs Accelerate (``pip install 'dpex[accelerate]'``).
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dpex.integrations import LoaderFigures, diagnosis_of, write_to

if TYPE_CHECKING:
    GeneralTracker = object  # the package has no types
else:
    GeneralTracker = importlib.import_module("accelerate.tracking").GeneralTracker


class DpexTracker(GeneralTracker):
    """Writes wait, workers and decisions of loaders whenever the script calls ``accelerator.log``.

    Give it to the `Accelerator` as ``log_with=[tracker]``. `dpex.log_to` lists the names of the figures.

    Args:
        writer: The destination: a writer that `dpex.log_to` accepts, or another tracker.
        loaders: `DpexDataLoader`s. `watch` adds more, such as the result of `dpex.serve`.
        print_diagnosis: Whether ``accelerator.end_training()`` prints the diagnosis of each loader.
    """

    name = "dpex"
    requires_logging_directory = False
    main_process_only = True

    def __init__(self, writer: Any, *loaders: Any, print_diagnosis: bool = True) -> None:
        super().__init__()
        self._write = write_to(writer)
        self._print_diagnosis = print_diagnosis
        self._readings = [LoaderFigures(loader) for loader in loaders]
        self._calls = 0

    @property
    def tracker(self) -> DpexTracker:
        """Return the object that ``accelerator.get_tracker`` unwraps to."""
        return self

    def watch(self, *loaders: Any) -> None:
        """Write the figures of these loaders, too."""
        self._readings += [LoaderFigures(loader) for loader in loaders]

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Keep nothing of the script's configuration."""

    def log(self, values: Mapping[str, Any], step: int | None = None, **others: Any) -> None:
        """Write the figures of each loader since the last call. Without a step, calls are counted from 0."""
        number = self._calls if step is None else step
        self._calls += 1
        for readings in self._readings:
            self._write(readings.take_figures(), number)

    def finish(self) -> None:
        """Print the diagnosis."""
        if self._print_diagnosis:
            for readings in self._readings:
                print(diagnosis_of(readings.loader), flush=True)
