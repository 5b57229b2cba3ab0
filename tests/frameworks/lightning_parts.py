"""A trainer of Lightning that is quiet and uses CPUs, and a module whose loss is given."""

from collections.abc import Callable
from typing import Any

import torch


def trainer(**options: Any) -> Any:
    """Return a Trainer for one process, but for ``options``."""
    import lightning

    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    return lightning.Trainer(**{"accelerator": "cpu", "devices": 1, "max_epochs": 1, **quiet, **options})


def module(model: torch.nn.Module, loss: Callable[[Any, Any], Any]) -> Any:
    """Return a LightningModule that trains ``model``; a step's loss is ``loss(model, batch)``."""
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, index: int) -> Any:
            return loss(self.model, batch)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1e-6)

    return Module()
