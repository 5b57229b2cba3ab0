"""Train with Lightning: its Trainer gets a tuned loader, and a callback tells what that did.

    python examples/train_lightning.py
    torchrun --nproc-per-node 2 examples/train_lightning.py     # each rank has its share of the pictures

It needs Lightning (`pip install 'dpex[lightning]'`). The data are FashionMNIST or the digits, see `pictures.py`.
"""

import os
from typing import Any

import lightning
import torch
from torch import nn

import dpex.lightning
from dpex import DpexDataLoader
from options import framework_parser
from pictures import pictures


class Classifier(lightning.LightningModule):
    """A linear layer; float32 (N, 1, 28, 28) to (N, 10) scores."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Flatten(), nn.Linear(28 * 28, 10))

    def training_step(self, batch: Any, batch_index: int) -> torch.Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(self.network(images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.001)


def main() -> None:
    """Train, and print how much of it was waiting."""
    options = framework_parser(__doc__).parse_args()
    loader = DpexDataLoader(pictures(train=True), batch_size=100, shuffle=True, num_workers="auto", name="train")
    trainer = lightning.Trainer(
        accelerator=options.accelerator,
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
        max_epochs=options.epochs,
        limit_train_batches=options.limit,
        callbacks=[dpex.lightning.DpexCallback()],  # logs wait and workers, and prints the diagnosis at the end
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Classifier(), loader)
    if trainer.is_global_zero:
        stats = trainer.train_dataloader.stats()  # of the loader that Lightning has built for this rank
        print(f"the last epoch: {stats.batches} batches, {stats.wait_ratio:.0%} of the time was waiting for them")


if __name__ == "__main__":
    main()
