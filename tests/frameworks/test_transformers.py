"""The Hugging Face Trainer: the callback has its loader served, and logs it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from families import Of
from packages import need

need("transformers", "needs transformers: pip install 'dpex[transformers]'")
need("accelerate", "needs Accelerate: pip install 'dpex[accelerate]'")


def rows_at(index: int) -> dict[str, torch.Tensor]:
    return {"x": torch.tensor([float(index)]), "labels": torch.tensor([0.0])}


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.layer(x) - labels).pow(2).mean()}


def test_auto_applies_to_the_trainers_loader_and_is_logged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import Trainer, TrainingArguments

    import dpex.transformers

    arguments = TrainingArguments(
        str(tmp_path),
        per_device_train_batch_size=4,
        num_train_epochs=2,
        logging_steps=4,
        learning_rate=1e-6,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        remove_unused_columns=False,
    )
    served: list[Any] = []

    class Spy(dpex.transformers.DpexTrainerCallback):
        def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            served.append(dpex.loader_behind(others["train_dataloader"]))
            super().on_train_end(args, state, control, **others)

    trainer = Trainer(model=Model(), args=arguments, train_dataset=Of(rows_at, 32), callbacks=[Spy("auto", name="hf")])
    trainer.train()
    assert (served[0]._is_auto, served[0].name, served[0].stats().batches) == (True, "hf", 8)
    told = [entry for entry in trainer.state.log_history if "dpex/hf/workers" in entry]
    assert len(told) >= 4
    assert "dpex diagnosis of hf" in capsys.readouterr().out
