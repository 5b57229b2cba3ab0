"""Two ranks on CPUs: batches, `"auto"`, figures and leftovers in each framework, and the examples; see `ranks`."""

import json
import os
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from packages import need
from programs import ran

from tests.frameworks.stream_ways import WAYS as STREAMS
from tests.frameworks.stream_ways import write_shards

pytestmark = pytest.mark.timeout(380)
for package in ("lightning", "accelerate", "transformers"):
    need(package, f"needs {package}: pip install 'dpex[{package}]'")
HERE = Path(__file__).parent
FRAMEWORKS = ("DDP", "Lightning", "Fabric", "Accelerate", "Trainer")
EXAMPLES = ("train_lightning.py", "train_accelerate.py", "train_transformers.py")
WAYS = ("fixed", "auto", "dpex run")
BATCHES = 3
"""Of a rank and an epoch: 24 rows, 2 ranks, 4 rows in a batch."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the ranks and the examples have written."""
    written = tmp_path_factory.mktemp("ranks")
    if all(map(find_spec, ("datasets", "webdataset"))):
        write_shards(written)
    environment = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(HERE.parents[1])}
    ran(HERE / "ranks.py", written, env={**os.environ, **environment}, timeout=350)
    return written


@pytest.fixture(scope="module")
def printed(folder: Path) -> dict[str, str]:
    told: dict[str, str] = json.loads((folder / "examples.json").read_text())
    return told


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


def indices(seen: Any) -> list[Any]:
    return [batch[0] for batch in seen["batches"]]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_ranks_share_the_rows(ranks: Any, framework: str) -> None:
    first = [row for rank in ranks for batch in indices(rank["seen"][framework]["torch"])[:BATCHES] for row in batch]
    assert sorted(first) == list(range(24))


@pytest.mark.parametrize("way", ["fixed", "dpex run"])
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_batches_are_torchs_bit_for_bit(ranks: Any, framework: str, way: str) -> None:
    for rank in ranks:
        found = rank["seen"][framework]
        assert len(found["torch"]["batches"]) == 2 * BATCHES
        assert found[way]["batches"] == found["torch"]["batches"]
        assert found[way]["is_tuned"] is False


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_auto_is_tuned_in_both_ranks_and_keeps_torchs_order(ranks: Any, framework: str) -> None:
    for rank in ranks:
        found = rank["seen"][framework]
        assert indices(found["auto"]) == indices(found["torch"])
        assert found["auto"]["is_tuned"] is True


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_figures_and_diagnosis_reach_the_user(ranks: Any, framework: str, way: str) -> None:
    for rank in ranks:
        found = rank["seen"][framework][way]
        assert (found["counted"], found["verdict"]) == (BATCHES, "too early to say")


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_nothing_is_left_behind(ranks: Any, framework: str) -> None:
    assert [rank["seen"][framework][way]["left"] for rank in ranks for way in WAYS] == [0] * 6


@pytest.mark.parametrize("way", STREAMS)
def test_streams_under_auto_are_torchs_in_each_rank(ranks: Any, way: str) -> None:
    for rank in ranks:
        if not rank["streams"]:
            pytest.skip("needs datasets and webdataset: pip install datasets webdataset")
        found = rank["streams"][way]
        assert len(found["torch"]) >= 4
        assert found["auto"] == found["torch"]


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_examples_train_and_tell(printed: dict[str, str], example: str) -> None:
    assert "dpex diagnosis of train" in printed[example]
    assert re.search(r"\d+% of the time was waiting", printed[example])
