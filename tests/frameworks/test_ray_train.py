"""Ray Train on two CPU ranks: batches, `"auto"`, metrics, and what is left behind."""

import contextlib
import functools
import io
import json
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from families import is_alive
from packages import need
from shared_ray import SharedRay, own_ray
from waiting import until

from dpex.options import WorkerConfig

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(380)]
ray = pytest.importorskip("ray", reason="needs Ray: pip install 'dpex[ray]'")
for package in ("pandas", "pyarrow"):
    need(package, "needs Ray Train: pip install 'dpex[ray-train]'")
EXAMPLES = Path(__file__).parents[2] / "examples"
left: Any = None
"""An iterator that lives as long as its training worker."""


def check(folder: str) -> None:
    """What each training worker does; it travels by value, and so does its dataset."""
    import ray.train
    import ray.train.torch
    import torch
    from torch.utils.data import DataLoader, Dataset

    import dpex
    from dpex import DpexDataLoader
    from dpex.loader.sizing import Sizing

    class Rows(Dataset[Any]):
        def __len__(self) -> int:
            return 40

        def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
            return index, torch.rand(())

    def batches(loader: Any) -> list[Any]:
        loader.sampler.set_epoch(1)
        torch.manual_seed(5)
        return [[indices.tolist(), drawn.tolist()] for indices, drawn in loader]

    def indices(seen: list[Any]) -> list[Any]:
        return [batch[0] for batch in seen]

    prepare = ray.train.torch.prepare_data_loader
    expected = batches(prepare(DataLoader(Rows(), 4, shuffle=True, num_workers=2)))
    fixed = DpexDataLoader(Rows(), 4, shuffle=True, num_workers=2, persistent_workers=True)
    auto = DpexDataLoader(
        Rows(), 4, shuffle=True, num_workers="auto", name="train", worker_config=WorkerConfig(memory_budget=1 << 20)
    )
    prepared, tuned = prepare(fixed), prepare(auto)
    behind_fixed, behind = dpex.serve(prepared, like=fixed), dpex.serve(tuned, like=auto)
    figures: dict[str, float] = {}
    log = dpex.log_to(lambda values, step: figures.update(values), tuned)
    found: dict[str, Any] = {
        "rows": indices(expected),
        "rank": ray.train.get_context().get_world_rank(),
        "batches": batches(prepared) == expected,
        "persistent": behind_fixed.persistent_workers,
        "indices": indices(batches(tuned)) == indices(expected),
        "options": [behind._is_auto, behind.name, behind.worker_config.memory_budget],
        "shown": [behind_fixed.stats().batches, behind.stats().batches, Sizing(behind).tuner() is not None],
        "verdict": behind.diagnose().verdict.title,
    }
    log(0)
    found["figures"] = figures
    behind_fixed.close()
    behind.close()
    found["children after"] = len(psutil.Process().children())
    global left
    left_loader = prepare(DataLoader(Rows(), 4))
    dpex.serve(left_loader, 2)
    left = iter(left_loader)
    next(left)  # and then training ends
    found["left"] = [process.pid for process in psutil.Process().children(recursive=True)]
    both: list[Any] = [None, None]
    torch.distributed.all_gather_object(both, found)
    if found["rank"] == 0:
        Path(folder, "ranks.json").write_text(json.dumps(both))


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory, ray_of_session: SharedRay) -> tuple[list[dict[str, Any]], str]:
    """What the ranks saw, and what the example printed: its training workers do `check` when they have trained."""
    import ray.cloudpickle
    from ray.train import torch as rays

    folder = str(tmp_path_factory.mktemp("ranks"))
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

    class CheckedTrainer(rays.TorchTrainer):
        def __init__(self, train: Any, **options: Any) -> None:
            super().__init__(functools.partial(trained_and_checked, train, folder), **options)

    examples_there = {"runtime_env": {"env_vars": {"PYTHONPATH": str(EXAMPLES)}}}
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(io.StringIO()) as out,
        own_ray(ray_of_session, examples_there, head={"num_cpus": 2}, nodes=()),
    ):
        patch.setattr(sys, "argv", ["train_ray.py", "--epochs", "2", "--limit", "3"])
        patch.syspath_prepend(str(EXAMPLES))
        patch.setattr(rays, "TorchTrainer", CheckedTrainer)
        runpy.run_path(str(EXAMPLES / "train_ray.py"), run_name="__main__")
    return json.loads(Path(folder, "ranks.json").read_text()), out.getvalue()


def trained_and_checked(train: Any, folder: str, config: dict[str, Any]) -> None:
    """The example's training loop, and then `check`."""
    train(config)
    check(folder)


@pytest.fixture(scope="module")
def ranks(told: Any) -> Any:
    return told[0]


def test_batches_are_torchs_and_auto_and_all_options_survive(ranks: Any) -> None:
    for rank in ranks:
        assert (rank["batches"], rank["indices"], rank["persistent"]) == (True, True, True)
        assert rank["options"] == [True, "train", 1 << 20]
        assert rank["shown"] == [5, 5, True]
    assert sorted(row for rank in ranks for batch in rank["rows"] for row in batch) == list(range(40))


def test_figures_and_diagnosis_reach_the_user(ranks: Any) -> None:
    for rank in ranks:
        assert 0 < rank["figures"]["dpex/train/wait_ratio"] <= 1
        assert rank["figures"]["dpex/train/batches_per_s"] > 0
        assert rank["verdict"] == "too early to say"


def test_nothing_is_left_behind(ranks: Any) -> None:
    for rank in ranks:
        assert rank["children after"] <= 1  # what workers are forked from, beside Ray's threads; it ends with training
        assert rank["left"]
        until(lambda left=rank["left"]: not any(map(is_alive, left)))


def test_the_example_trains_and_tells(told: Any) -> None:
    assert "dpex diagnosis of train" in told[1]
    assert re.search(r"^\d+% of the time was waiting, loss [\d.]+$", told[1], re.MULTILINE)
