"""Trains in every framework on two ranks, with torch's loader and dpex's, and writes down what was seen.

`test_two_ranks` starts it with a folder. Importing the frameworks takes longest: one process imports them and forks
both ranks, which find themselves in torchrun's environment. A third fork runs the examples without ranks. Each fork
writes a file into the folder: a rank a `Seen` for each framework and each way to make the loader, the third one what
the examples print.
"""

import contextlib
import io
import json
import os
import runpy
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import dpex
from dpex import DpexDataLoader, loader_behind
from dpex.run.install import install
from dpex.run.run_options import RunOptions
from tests.frameworks import lightning_parts, stream_ways
from tests.inspection import tuner_of
from tests.waiting import until

EXAMPLES = Path(__file__).parents[2] / "examples"
RUN = ("train_lightning.py", "train_accelerate.py", "train_transformers.py")
RANKS = 2
TORCHRUN = {
    **dict.fromkeys(("GROUP_RANK", "ROLE_RANK", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"), "0"),
    **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), str(RANKS)),
    "GROUP_WORLD_SIZE": "1",
    "ROLE_NAME": "default",
    "TORCHELASTIC_RUN_ID": "ranks",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}
"""What torchrun sets. Nobody meets at the master's port: the ranks meet in a file."""
EPOCHS = 2
BATCH = 4
PATIENCE_S = 60.0
"""Until then processes that were told to end are gone, unless the machine hardly runs them."""
WAYS = ("torch", "fixed", "auto", "dpex run")
"""torch's loader; dpex's with the same number; with "auto"; torch's as below ``dpex run --num-workers keep``."""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """batches: indices and draws, in order. is_tuned, verdict: of the loader of dpex's, if there was one.

    counted: batches of the last pass. left: processes that are left.
    """

    batches: list[Any]
    is_tuned: bool
    verdict: str
    counted: int
    left: int


class Rows(Dataset[Any]):
    """The row, and a random number."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": torch.tensor([float(index)]), "labels": torch.rand(1)}


class Model(torch.nn.Module):
    """Writes down what it gets."""

    def __init__(self, batches: list[Any]) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.batches = batches

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        self.batches.append([x.flatten().tolist(), labels.flatten().tolist()])
        return {"loss": (self.layer(x) - labels).pow(2).mean()}


def loader_of(way: str, **options: Any) -> Any:
    """The loader that the user makes."""
    if way in ("torch", "dpex run"):
        return DataLoader(Rows(), BATCH, num_workers=1, **options)
    return DpexDataLoader(Rows(), BATCH, num_workers=1 if way == "fixed" else "auto", name=way, **options)


# -- frameworks: each trains, and returns the loader that it iterated --------------------------------------------------


def plain(way: str, batches: list[Any]) -> Any:
    """DistributedDataParallel."""
    sampler = DistributedSampler(Rows(), seed=3)
    loader = loader_of(way, sampler=sampler)
    model = torch.nn.parallel.DistributedDataParallel(Model(batches))
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for batch in loader:
            model(**batch)["loss"].backward()
    return loader


def lightning(way: str, batches: list[Any]) -> Any:
    """Lightning's Trainer puts the DistributedSampler in."""
    trainer = lightning_parts.trainer(devices=2, strategy="ddp", max_epochs=EPOCHS)
    loader = loader_of(way, shuffle=True)
    trainer.fit(lightning_parts.module(Model(batches), lambda model, batch: model(**batch)["loss"]), loader)
    return trainer.train_dataloader


def fabric(way: str, batches: list[Any]) -> Any:
    """Fabric's loop is the user's own."""
    from lightning.fabric import Fabric

    started = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    started.launch()
    loader = loader_of(way, shuffle=True)
    model, prepared = started.setup(Model(batches)), started.setup_dataloaders(loader)
    for epoch in range(EPOCHS):
        prepared.sampler.set_epoch(epoch)
        for batch in prepared:
            started.backward(model(**batch)["loss"])
    return prepared


def accelerate(way: str, batches: list[Any]) -> Any:
    """Accelerate shares batches out."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    loader = loader_of(way, shuffle=True)
    model, prepared = accelerator.prepare(Model(batches), loader)
    if isinstance(loader, DpexDataLoader):
        dpex.serve(prepared, like=loader)
    for _ in range(EPOCHS):
        for batch in prepared:
            accelerator.backward(model(**batch)["loss"])
    return prepared


def transformers(way: str, batches: list[Any]) -> Any:
    """The Hugging Face Trainer makes the loader itself."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    counts: dict[str, Any] = {"fixed": 1, "auto": "auto"}
    made: list[Any] = []

    class Keep(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            made.append(others["train_dataloader"])
            if way in counts:
                dpex.serve(made[0], counts[way], name=way)

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            dataloader_num_workers=1,
            per_device_train_batch_size=BATCH,
            num_train_epochs=EPOCHS,
            learning_rate=1e-6,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
            remove_unused_columns=False,
        )
        trainer = Trainer(model=Model(batches), args=arguments, train_dataset=Rows(), callbacks=[Keep()])
        trainer.train()
    return made[0]


FRAMEWORKS: dict[str, Callable[[str, list[Any]], Any]] = {
    "DDP": plain,
    "Lightning": lightning,
    "Fabric": fabric,
    "Accelerate": accelerate,
    "Trainer": transformers,
}


@contextlib.contextmanager
def below_dpex_run(way: str) -> Iterator[None]:
    """Loaders that are torch's are taken over, as `dpex run --num-workers keep` does."""
    if way != "dpex run":
        yield
        return
    torchs = DataLoader._get_iterator
    install(RunOptions(num_workers="keep"))
    try:
        yield
    finally:
        DataLoader._get_iterator = torchs  # type: ignore[method-assign]


def seen(framework: str, way: str) -> Seen:
    """Train, and tell."""
    before = set(psutil.Process().children(recursive=True))
    torch.manual_seed(7)
    batches: list[Any] = []
    with below_dpex_run(way):
        behind = loader_behind(FRAMEWORKS[framework](way, batches))
    found = {
        "is_tuned": behind is not None and tuner_of(behind) is not None,
        "verdict": "" if behind is None else behind.diagnose().verdict.title,
        "counted": 0 if behind is None else behind.stats().batches,
    }
    if behind is not None:
        behind.close()
    begun = set(psutil.Process().children(recursive=True)) - before
    with contextlib.suppress(AssertionError):
        until(lambda: not any(map(runs, begun)), PATIENCE_S)
    return Seen(batches=batches, left=sum(map(runs, begun)), **found)


def runs(process: psutil.Process) -> bool:
    """Whether it does. A container's first process may leave one that has ended a zombie for ever."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def printed(example: str) -> str:
    """What the example prints."""
    sys.argv = [example, "--epochs", "1", "--limit", "3", "--accelerator", "cpu"]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        runpy.run_path(str(EXAMPLES / example), run_name="__main__")
    return out.getvalue()


def examples(folder: Path) -> None:
    """Run them, and write down what they print."""
    sys.path.insert(0, str(EXAMPLES))
    (folder / "examples.json").write_text(json.dumps({name: printed(name) for name in RUN}))


def rank(folder: Path, number: int) -> None:
    """Train in every framework; read streams too where the folder has shards for them."""
    os.environ |= {**TORCHRUN, "RANK": str(number), "LOCAL_RANK": str(number)}
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=number, world_size=RANKS)
    found = {name: {way: asdict(seen(name, way)) for way in WAYS} for name in FRAMEWORKS}
    urls = sorted(str(name) for name in folder.glob("*.tar"))
    streams = {way: stream_ways.both(way, urls, number) for way in stream_ways.WAYS} if urls else {}
    (folder / f"{number}.json").write_text(json.dumps({"seen": found, "streams": streams}))
    if dist.is_initialized():
        dist.destroy_process_group()


def import_frameworks() -> None:
    """Import what the forks need, but for the examples."""
    import accelerate
    import lightning
    import transformers

    assert accelerate.Accelerator
    assert lightning.fabric.Fabric
    assert transformers.Trainer


def main(folder: Path) -> None:
    """Fork, and end with an error if a fork does."""
    warnings.simplefilter("ignore")
    import_frameworks()
    forks = []
    for body in (partial(rank, folder, 0), partial(rank, folder, 1), partial(examples, folder)):
        forks.append(os.fork())
        if not forks[-1]:
            body()
            return
    codes = [os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]) for fork in forks]
    assert codes == [0, 0, 0], codes


if __name__ == "__main__":
    main(Path(sys.argv[1]))
