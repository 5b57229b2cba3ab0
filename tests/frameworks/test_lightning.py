"""Lightning and Fabric: "auto", the class imported late, and the callback."""

import gc
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from packages import need
from torch.utils.data import TensorDataset

from dpex import DpexDataLoader, loader_behind
from tests.frameworks.lightning_parts import module, trainer

need("lightning", "needs Lightning: pip install 'dpex[lightning]'")
DATA = TensorDataset(torch.arange(64.0).reshape(-1, 1))
LAYER = torch.nn.Linear(1, 1)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def squares(layer: Any, batch: Any) -> Any:
    return layer(batch[0]).pow(2).mean()


def test_the_callback_logs_and_prints_the_diagnosis(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from lightning.pytorch.loggers import CSVLogger

    import dpex.lightning

    loader = DpexDataLoader(DATA, 4, shuffle=True, num_workers="auto", name="train")
    callback = dpex.lightning.DpexCallback(every_n_steps=8)
    trainer(callbacks=[callback], logger=CSVLogger(tmp_path), max_epochs=2).fit(module(LAYER, squares), loader)
    assert loader.stats().batches == 16
    (written,) = tmp_path.rglob("metrics.csv")
    header, *rows = written.read_text().splitlines()
    names = {"wait_ratio", "batches_per_s", "workers", "prefetch", "decisions"}
    assert {f"dpex/train/{name}" for name in names} <= set(header.split(","))
    assert len(rows) >= 4
    assert "dpex diagnosis of train" in capsys.readouterr().out
    loader.close()


def test_the_callback_lets_go_of_loaders_of_earlier_epochs() -> None:
    import dpex.lightning

    made: list[weakref.ref[Any]] = []
    alive: list[int] = []

    def train_dataloader() -> Any:
        loader: DpexDataLoader[Any] = DpexDataLoader(DATA, 16, num_workers=1, persistent_workers=True)
        made.append(weakref.ref(loader))
        return loader

    def count(*_: Any) -> None:
        gc.collect()
        alive.append(sum(loader() is not None for loader in made))

    trained = module(LAYER, squares)
    trained.train_dataloader, trained.on_train_epoch_end = train_dataloader, count
    callback = dpex.lightning.DpexCallback(print_diagnosis=False)
    trainer(callbacks=[callback], max_epochs=3, reload_dataloaders_every_n_epochs=1).fit(trained)
    assert len(made) == 3
    assert alive == [1, 1, 1]


def test_fabric_uses_the_loader_and_loader_behind_finds_it() -> None:
    from lightning.fabric import Fabric

    loader = DpexDataLoader(DATA, 4, num_workers="auto", name="fabric")
    prepared = Fabric(accelerator="cpu", devices=1).setup_dataloaders(loader)
    assert sum(len(batch[0]) for batch in prepared) == 64
    assert loader_behind(prepared) is loader
    assert (loader.stats().batches, loader.decisions) == (16, loader_behind(prepared).decisions)  # type: ignore[union-attr]
    loader.close()


def test_a_mid_epoch_checkpoint_resumes_with_the_next_batch(tmp_path: Path) -> None:
    """Lightning saves and loads the loader's state by itself."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    def loader() -> Any:
        generator = torch.Generator().manual_seed(5)
        return DpexDataLoader(DATA, 4, shuffle=True, num_workers=1, seeding="batch", generator=generator)

    with loader() as whole:
        expected = [batch[0].flatten().tolist() for batch in whole]
    seen: list[Any] = []

    def noted(layer: Any, batch: Any) -> Any:
        seen.append(batch[0].flatten().tolist())
        return squares(layer, batch)

    keep = ModelCheckpoint(dirpath=tmp_path, filename="middle", every_n_train_steps=5)
    trainer(max_epochs=2, max_steps=5, callbacks=[keep], enable_checkpointing=True).fit(module(LAYER, noted), loader())
    trainer().fit(module(LAYER, noted), loader(), ckpt_path=tmp_path / "middle.ckpt")
    assert seen == expected
