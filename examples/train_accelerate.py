"""Train with Accelerate: one line after `prepare` has dpex make the batches.

    python examples/train_accelerate.py
    torchrun --nproc-per-node 2 examples/train_accelerate.py    # or: accelerate launch examples/train_accelerate.py

It needs Accelerate (`pip install 'dpex[accelerate]'`). The data are FashionMNIST or the digits, see `pictures.py`.
"""

from itertools import islice

import torch
from accelerate import Accelerator
from torch import nn

import dpex.accelerate
from dpex import DpexDataLoader
from options import framework_parser
from pictures import pictures


def main() -> None:
    """Train, and print wait and workers after each epoch; the diagnosis comes at the end."""
    options = framework_parser(__doc__).parse_args()
    loader = DpexDataLoader(pictures(train=True), batch_size=100, shuffle=True, num_workers="auto", name="train")
    tracker = dpex.accelerate.DpexTracker(show)  # or a TensorBoard SummaryWriter, or a W&B run
    accelerator = Accelerator(cpu=options.accelerator == "cpu", log_with=[tracker])
    accelerator.init_trackers("pictures")

    network = nn.Sequential(nn.Flatten(), nn.Linear(28 * 28, 10))
    optimizer = torch.optim.Adam(network.parameters(), lr=0.001)
    network, optimizer, prepared = accelerator.prepare(network, optimizer, loader)
    tracker.watch(dpex.serve(prepared, like=loader))
    for epoch in range(options.epochs):
        for images, labels in islice(prepared, options.limit):
            loss = nn.functional.cross_entropy(network(images), labels)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
        accelerator.log({"loss": loss.item()}, step=epoch + 1)
    accelerator.end_training()


def show(values: dict[str, float], epoch: int) -> None:
    """Print what the tracker is told."""
    wait, workers = values["dpex/train/wait_ratio"], values["dpex/train/workers"]
    print(f"epoch {epoch}: {wait:.0%} of the time was waiting for batches, {workers:.0f} workers")


if __name__ == "__main__":
    main()
