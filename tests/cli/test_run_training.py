"""Plain PyTorch scripts below ``dpex run`` and ``dpex diagnose``: they see what they see under Python, made by dpex."""

import json
import re
import sys
from typing import Any

import pytest

from tests.cli.commands import dpex, python

ITERATORS = "dpex.engine.with_workers"
AUGMENTED = ("shuffled", "again", "module", "subclass", "unpickled", "in process", "persistent")


def told(done: Any) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    return told(python("train.py", "--epochs", "3"))


@pytest.fixture(scope="module")
def kept() -> dict[str, Any]:
    """``dpex diagnose`` is ``dpex run --num-workers keep``."""
    done = dpex("diagnose", "train.py", "--epochs", "3")
    assert done.stderr.count("dpex diagnosis of") == 1
    return told(done)


@pytest.fixture(scope="module")
def auto() -> Any:
    return dpex("run", "train.py", "--", "--num-workers", "9")


def test_with_keep_nothing_differs_but_who_makes_the_batches(plain: Any, kept: Any) -> None:
    assert plain.pop("iterator") == "torch.utils.data.dataloader"
    assert kept.pop("iterator") == ITERATORS
    assert kept == plain


def test_loaders_stay_torchs_own_class_with_the_scripts_number(kept: Any) -> None:
    kinds = kept["kinds"]
    assert kinds.pop("subclass") == ["__main__", True, 2]
    assert kinds.pop("in process") == ["torch.utils.data.dataloader", True, 0]
    assert set(map(tuple, kinds.values())) == {("torch.utils.data.dataloader", True, 2)}


def test_with_auto_indices_and_order_are_torchs(plain: Any, auto: Any) -> None:
    found = told(auto)
    for name in AUGMENTED:
        assert [batch[0] for batch in found["passes"][name]] == [batch[0] for batch in plain["passes"][name]], name
    assert found["stream"] == plain["stream"]
    assert found["iterator"] == ITERATORS


def test_augmentations_under_auto_differ_but_are_reproducible(plain: Any, auto: Any) -> None:
    passes = told(auto)["passes"]
    assert passes["shuffled"] == passes["again"]
    assert passes["shuffled"] != plain["passes"]["shuffled"]


def test_a_loader_without_workers_stays_inline_with_one_line(plain: Any, auto: Any) -> None:
    assert told(auto)["passes"]["in process"] == plain["passes"]["in process"]
    lines = [line for line in auto.stderr.splitlines() if "num_workers=0" in line]
    assert len(lines) == 1
    assert "num_workers=0 and stays in the training process; --also-in-process" in lines[0]


def test_the_end_prints_a_line_per_loader_and_one_report(auto: Any) -> None:
    lines = [line for line in auto.stderr.splitlines() if re.match("dpex run: an? .*batch", line)]
    pattern = r"dpex run: an? \w+ of a \w+: \d workers?( became [^:]+)?, .*(\d batches|wait \d+ %).*"
    assert [line for line in lines if not re.fullmatch(pattern, line)] == []
    assert any("an InfiniteLoader of a Rows: 2 workers" in line for line in lines)
    assert len(lines) <= 8
    assert (auto.stderr.count("dpex diagnosis of"), auto.stderr.count("First: ")) == (1, 1)


TORCHRUN = "-m torch.distributed.run --standalone --nproc-per-node=2"
OUTSIDE = f"{TORCHRUN} --no-python {sys.executable} -m dpex run ddp.py"
LAUNCHES = [
    pytest.param(f"-m dpex run {TORCHRUN} ddp.py", id="dpex run of torchrun"),
    pytest.param(OUTSIDE, id="torchrun of dpex run", marks=pytest.mark.long),
]


@pytest.mark.parametrize("launch", LAUNCHES)
def test_every_rank_of_a_launcher_is_taken_over(launch: str) -> None:
    done = python(*launch.split())
    assert done.returncode == 0, done.stderr
    assert "counts [2.0]" in done.stdout
    assert f"by {ITERATORS} {ITERATORS}" in done.stdout


@pytest.mark.long
def test_spawned_ranks_are_taken_over_and_one_reports() -> None:
    done = dpex("diagnose", "ddp.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("counts [2.0] totals")
    assert done.stdout.endswith(f"by {ITERATORS} {ITERATORS}\n")
    assert done.stderr.count("dpex diagnosis of") == 1


def test_a_forked_process_has_iterators_of_its_own() -> None:
    done = dpex("run", "--num-workers", "keep", "--quiet", "forked.py")
    batches = f"[[0, 1, 2, 3], [4, 5, 6, 7]] {ITERATORS}"
    assert done.stdout.splitlines() == [f"{who} {batches}" for who in ("parent", "child", "parent after 0")], (
        done.stderr
    )
