"""Train with the Trainer of Hugging Face's transformers: a callback has dpex make the training batches.

    python examples/train_transformers.py
    torchrun --nproc-per-node 2 examples/train_transformers.py

It needs transformers (`pip install 'dpex[transformers]'`). The data are FashionMNIST or the digits, see `pictures.py`.
"""

import tempfile
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainingArguments

import dpex.transformers
from options import framework_parser
from pictures import pictures


class Classifier(nn.Module):
    """A linear layer; float32 (N, 1, 28, 28) to the loss and (N, 10) scores."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Flatten(), nn.Linear(28 * 28, 10))

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        scores = self.network(images)
        return {"loss": nn.functional.cross_entropy(scores, labels), "logits": scores}


def collate(samples: list[Any]) -> dict[str, torch.Tensor]:
    """Return a batch with the names of `Classifier.forward`."""
    images, labels = zip(*samples, strict=True)
    return {"images": torch.stack(images), "labels": torch.tensor(labels)}


def main() -> None:
    """Train; the callback prints the diagnosis at the end."""
    options = framework_parser(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=100,
            num_train_epochs=options.epochs,
            max_steps=options.limit or -1,
            use_cpu=options.accelerator == "cpu",
            logging_strategy="epoch",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        trainer = Trainer(
            model=Classifier(),
            args=arguments,
            train_dataset=pictures(train=True),
            data_collator=collate,
            callbacks=[dpex.transformers.DpexTrainerCallback("auto", name="train")],
        )
        trainer.train()
    if trainer.is_world_process_zero():
        for entry in trainer.state.log_history:
            if "dpex/train/wait_ratio" in entry:
                print(f"epoch {entry['epoch']:.0f}: {entry['dpex/train/wait_ratio']:.0%} of the time was waiting")


if __name__ == "__main__":
    main()
