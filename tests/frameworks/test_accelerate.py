"""Accelerate: one line has a prepared loader served with all options, and the tracker writes its figures."""

from typing import Any

import psutil
import pytest
import torch
from inspection import tuner_of
from packages import need
from torch.utils.data import DataLoader, TensorDataset

from dpex import DpexDataLoader, OptionError, loader_behind, serve
from dpex.options import WorkerConfig

need("accelerate", "needs Accelerate: pip install 'dpex[accelerate]'")
DATA = TensorDataset(torch.arange(64.0).reshape(-1, 1))


def total(loader: Any) -> int:
    return sum(len(batch) for (batch,) in loader)


def test_what_is_prepared_is_served_like_the_own_loader() -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    before = psutil.Process().children(recursive=True)
    loader = DpexDataLoader(
        DATA, 4, shuffle=True, num_workers="auto", name="train", worker_config=WorkerConfig(memory_budget=1 << 20)
    )
    prepared = accelerator.prepare(loader)
    assert type(prepared.base_dataloader) is DataLoader
    behind = serve(prepared, like=loader)
    assert loader_behind(prepared) is behind
    assert [total(prepared), total(prepared)] == [64, 64]
    assert (behind._is_auto, behind.name, behind.worker_config.memory_budget) == (True, "train", 1 << 20)
    assert (behind.stats().batches, tuner_of(behind) is not None) == (16, True)
    assert "diagnosis of train" in str(behind.diagnose())
    rest = accelerator.skip_first_batches(prepared, 10)
    of_rest = serve(rest, like=loader)
    assert (total(rest), of_rest.stats().batches) == (24, 6)
    behind.close()
    of_rest.close()
    assert set(psutil.Process().children(recursive=True)) <= set(before)


def test_the_tracker_writes_and_prints(capsys: pytest.CaptureFixture[str]) -> None:
    from accelerate import Accelerator

    import dpex.accelerate

    kept: list[tuple[dict[str, float], int]] = []
    loader = DpexDataLoader(DATA, 4, num_workers=1, name="tracked")
    tracker = dpex.accelerate.DpexTracker(lambda values, step: kept.append((values, step)))
    accelerator = Accelerator(cpu=True, log_with=[tracker])
    accelerator.init_trackers("project")
    prepared = accelerator.prepare(loader)
    tracker.watch(serve(prepared, like=loader))
    assert total(prepared) == 64
    accelerator.log({"loss": 1.0})
    accelerator.log({"loss": 1.0}, step=16)
    accelerator.log({"loss": 1.0})
    accelerator.end_training()
    values = kept[0][0]
    assert [step for _, step in kept] == [0, 16, 2]
    assert 0 < values["dpex/tracked/wait_ratio"] <= 1
    assert values["dpex/tracked/batches_per_s"] > 0
    assert "dpex diagnosis of tracked" in capsys.readouterr().out


def test_a_stateful_loader_is_refused() -> None:
    need("torchdata", "needs torchdata: pip install torchdata")
    from accelerate import Accelerator, DataLoaderConfiguration

    stateful = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True))
    loader = DpexDataLoader(DATA, 4, num_workers=1)
    with pytest.raises(OptionError, match="its class makes iterators itself"):
        serve(stateful.prepare(loader), like=loader)
