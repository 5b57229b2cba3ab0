"""Train with Ray Train: each training worker has a tuned loader over its share, and reports what that did.

    python examples/train_ray.py                        # two training workers on a private Ray of this machine
    python examples/train_ray.py --address auto         # on the cluster that RAY_ADDRESS names

It needs Ray Train (`pip install 'dpex[ray-train]'`). The data are FashionMNIST or the digits, see `pictures.py`.
"""

import argparse
import tempfile
from itertools import islice
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_data_loader, prepare_model
from torch import nn

from dpex import DpexDataLoader, log_to, serve
from pictures import pictures


def train(config: dict[str, Any]) -> None:
    """Train in one training worker."""
    network = prepare_model(nn.Sequential(nn.Flatten(), nn.Linear(28 * 28, 10)))
    optimizer = torch.optim.Adam(network.parameters(), lr=0.001)

    loader = DpexDataLoader(pictures(train=True), batch_size=100, shuffle=True, num_workers="auto", name="train")
    prepared = prepare_data_loader(loader)
    served = serve(prepared, like=loader)
    figures: dict[str, float] = {}
    log = log_to(lambda values, step: figures.update(values), served)
    for epoch in range(config["epochs"]):
        if hasattr(prepared.sampler, "set_epoch"):  # with several training workers
            prepared.sampler.set_epoch(epoch)
        for images, labels in islice(prepared, config["limit"]):
            loss = nn.functional.cross_entropy(network(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        log(epoch)
        report(network, {"loss": loss.item(), "diagnosis": str(served.diagnose()), **figures})
    served.close()


def report(network: nn.Module, metrics: dict[str, Any]) -> None:
    """Report the metrics with a checkpoint, which training worker 0 writes."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = None
        if ray.train.get_context().get_world_rank() == 0:
            torch.save(network.state_dict(), Path(folder) / "network.pt")
            checkpoint = Checkpoint.from_directory(folder)
        ray.train.report(metrics, checkpoint=checkpoint)


def main() -> None:
    """Train, and print what training worker 0 reported at last."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--epochs", type=int, default=2, help="passes over the data (2)")
    options.add_argument("--limit", type=int, metavar="N", help="end each epoch after N batches")
    options.add_argument("--training-workers", type=int, default=2, help="training workers (2)")
    options.add_argument("--address", default="local", help="of the Ray cluster (local: a private one)")
    chosen = options.parse_args()

    if not ray.is_initialized():
        ray.init(address=chosen.address)
    with tempfile.TemporaryDirectory() as folder:  # on several machines: a folder or a bucket that all of them reach
        trainer = TorchTrainer(
            train,
            train_loop_config={"epochs": chosen.epochs, "limit": chosen.limit},
            scaling_config=ScalingConfig(num_workers=chosen.training_workers, use_gpu=torch.cuda.is_available()),
            run_config=RunConfig(storage_path=folder),
        )
        last = trainer.fit().metrics
    print(last["diagnosis"])
    print(f"{last['dpex/train/wait_ratio']:.0%} of the time was waiting, loss {last['loss']:.3f}")


if __name__ == "__main__":
    main()
