"""Accelerate: what it prepares is served with all options, and the tracker writes what it does."""

from typing import Any

import psutil
import pytest
import torch
from packages import need
from torch.utils.data import DataLoader, TensorDataset

from dpex import DpexDataLoader, loader_behind
from dpex.options import WorkerConfig

need("accelerate", "needs Accelerate: pip install 'dpex[accelerate]'")
DATA = TensorDataset(torch.arange(64.0).reshape(-1, 1))


def total(loader: Any) -> int:
    return sum(len(batch) for (batch,) in loader)


def test_what_is_prepared_is_served_and_the_own_loader_shows_it() -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    before = psutil.Process().children(recursive=True)
    loader = DpexDataLoader(
        DATA, 4, shuffle=True, num_workers="auto", name="train", worker_config=WorkerConfig(memory_budget=1 << 20)
    )
    prepared = accelerator.prepare(loader)
    assert type(prepared.base_dataloader) is DataLoader
    assert [total(prepared), total(prepared)] == [64, 64]
    behind: Any = loader_behind(prepared)
    assert (behind._is_auto, behind.name, behind.worker_config.memory_budget) == (True, "train", 1 << 20)
    assert loader.stats().batches == 16
    assert behind._tuning() is loader._tuning() is not None
    assert "diagnosis of train" in str(loader.diagnose())
    assert total(accelerator.skip_first_batches(prepared, 10)) == 24
    assert loader.stats().batches == 6
    loader.close()
    assert set(psutil.Process().children(recursive=True)) <= set(before)


def test_the_tracker_writes_and_prints(capsys: pytest.CaptureFixture[str]) -> None:
    from accelerate import Accelerator

    import dpex.accelerate

    kept: list[tuple[dict[str, float], int]] = []
    loader = DpexDataLoader(DATA, 4, num_workers=1, name="tracked")
    tracker = dpex.accelerate.DpexTracker(lambda values, step: kept.append((values, step)), loader)
    accelerator = Accelerator(cpu=True, log_with=[tracker])
    accelerator.init_trackers("project")
    assert total(accelerator.prepare(loader)) == 64
    accelerator.log({"loss": 1.0}, step=16)
    accelerator.end_training()
    ((values, step),) = kept
    assert step == 16
    assert 0 < values["dpex/tracked/wait_ratio"] <= 1
    assert values["dpex/tracked/batches_per_s"] > 0
    assert "dpex diagnosis of tracked" in capsys.readouterr().out
