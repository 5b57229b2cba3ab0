"""The Hugging Face Trainer: `DpexTrainerCallback` serves and logs the training loader, and prints the diagnosis.

It needs transformers (``pip install 'dpex[transformers]'``).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Literal

from dpex.integrations import LoaderFigures, diagnosis_of, loader_behind, serve

if TYPE_CHECKING:
    from transformers.trainer_callback import TrainerCallback
else:
    TrainerCallback = importlib.import_module("transformers").TrainerCallback


class DpexTrainerCallback(TrainerCallback):  # type: ignore[misc]  # mypy skips the package
    """Lets dpex make the training batches, and adds wait, workers and decisions to the logs of the `Trainer`.

    The figures have the names that `dpex.log_to` lists. They appear in ``trainer.state.log_history``, and in the logs
    that later callbacks receive.

    Args:
        num_workers: The number of workers, or ``"auto"``, in place of ``dataloader_num_workers``; see `dpex.serve`.
            None keeps the training loader, and logs it if dpex makes its batches.
        print_diagnosis: True prints the diagnosis in the main process at the end of training.
        options: Options of `DpexDataLoader`, by name. They need ``num_workers``.
    """

    def __init__(
        self, num_workers: int | Literal["auto"] | None = None, *, print_diagnosis: bool = True, **options: Any
    ) -> None:
        self._num_workers, self._options = num_workers, options
        self._print_diagnosis = print_diagnosis
        self._readings: LoaderFigures | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Have dpex make the batches of the training loader."""
        if self._num_workers is not None:
            serve(others["train_dataloader"], self._num_workers, **self._options)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **others: Any) -> None:
        """Add the figures since the last entry."""
        loader = others.get("train_dataloader")
        if logs is None or loader_behind(loader) is None:
            return
        if self._readings is None or self._readings.loader is not loader_behind(loader):
            self._readings = LoaderFigures(loader)
        values = self._readings.take_figures()
        logs.update(values)
        if state.log_history:
            state.log_history[-1].update(values)

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Print the diagnosis."""
        if self._print_diagnosis and state.is_world_process_zero:
            print(diagnosis_of(others.get("train_dataloader")), flush=True)
        self._readings = None
