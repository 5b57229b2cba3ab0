"""Lightning: `DpexCallback` logs figures of the training loaders, and prints the diagnosis at the end.

It needs Lightning (``pip install 'dpex[lightning]'``).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from dpex.integrations import LoaderFigures, diagnosis_of, loader_behind

if TYPE_CHECKING:
    from lightning.pytorch.callbacks.callback import Callback
else:
    Callback = importlib.import_module("lightning.pytorch").Callback


class DpexCallback(Callback):  # type: ignore[misc]  # mypy skips the package
    """Logs wait, workers and decisions of the training loaders to the trainer's loggers.

    `dpex.log_to` lists the names of the figures. Loaders that dpex does not serve are left out.

    Args:
        every_n_steps: The batches between two entries. None: the trainer's ``log_every_n_steps``.
        print_diagnosis: Whether rank 0 prints the diagnosis of each loader when training ends.
    """

    def __init__(self, *, every_n_steps: int | None = None, print_diagnosis: bool = True) -> None:
        self._every_n_steps = every_n_steps
        self._print_diagnosis = print_diagnosis
        self._readings: list[LoaderFigures] = []

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Let go of loaders of earlier epochs (``reload_dataloaders_every_n_epochs``), whose workers can then end."""
        self._read(trainer)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log once every ``every_n_steps`` batches."""
        if (batch_idx + 1) % (self._every_n_steps or trainer.log_every_n_steps) == 0:
            self._log(trainer)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Log at the end of each epoch, too, because an epoch may be shorter than the interval."""
        self._log(trainer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Print the diagnosis."""
        if self._print_diagnosis and trainer.is_global_zero:
            for loader in _loaders(trainer):
                print(diagnosis_of(loader), flush=True)
        self._readings.clear()

    def _log(self, trainer: Any) -> None:
        self._read(trainer)
        for readings in self._readings:
            values = readings.take_figures()
            for logger in trainer.loggers:
                logger.log_metrics(values, step=trainer.global_step)

    def _read(self, trainer: Any) -> None:
        """Keep the readings of the present training loaders only, and make readings for new ones."""
        known = {id(readings.loader): readings for readings in self._readings}
        behind = [loader_behind(loader) for loader in _loaders(trainer)]
        self._readings = [known.get(id(loader)) or LoaderFigures(loader) for loader in behind]


def _loaders(trainer: Any) -> list[Any]:
    """Return the training loaders that dpex serves."""
    combined = trainer.fit_loop._combined_loader
    loaders = [] if combined is None else combined.flattened
    return [loader for loader in loaders if loader_behind(loader) is not None]
