"""The verdict on a job of four real ranks, whose loading is planted to be slow in several ways; see `job_ranks`."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parent / "job_ranks.py"
ENVIRON = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}


def run(*command: str | Path) -> str:
    """Run it, and return what it printed."""
    done = subprocess.run([*map(str, command)], env=ENVIRON, capture_output=True, text=True, timeout=220, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stderr


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("job")
    run(sys.executable, SCRIPT, folder)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(4)]


CASES = {
    "slow disk of rank 1": ("rank", [1]),
    "slow node": ("node", [2, 3]),
    "slow step of rank 1": ("none", []),
    "all equal": ("none", []),
    "all slow": ("alike", []),
    "moving": ("moving", []),
    "from the middle on": ("rank", [3]),
}


@pytest.mark.parametrize("case", CASES)
def test_planted_case_is_found_by_all_ranks(ranks: list[dict[str, Any]], case: str) -> None:
    told = [rank[case] for rank in ranks]
    assert [(one["verdict"], one["culprits"]) for one in told] == [CASES[case]] * 4, told[0]["text"]
    assert len({one["lost_ratio"] for one in told}) == 1


def test_cause_and_beginning_are_told(ranks: list[dict[str, Any]]) -> None:
    """The other ranks' own reports know of no slow disk.

    Other work on the machine moves the beginning by some batches. `unit/diagnose/test_job.py` tests the exact one.
    """
    disk, middle = ranks[0]["slow disk of rank 1"], ranks[0]["from the middle on"]
    assert "The cause is storage-bound reading" in " ".join(disk["text"].split())
    assert [rank["slow disk of rank 1"]["own"] == "storage" for rank in ranks] == [False, True, False, False]
    assert disk["since"] < 25 <= middle["since"]
    assert f"since batch {middle['since']}" in " ".join(middle["text"].split())


@pytest.mark.long
def test_launch_by_torchrun_has_one_report(tmp_path: Path) -> None:
    """Of torch's own loaders, by the process of rank 0."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4", "--rdzv-backend", "c10d"]
    report = tmp_path / "report.json"
    diagnose = ["--no-python", sys.executable, "-m", "dpex", "diagnose", "--json", report]
    printed = " ".join(run(*launcher, "--rdzv-endpoint", "localhost:0", *diagnose, SCRIPT, "--launched").split())
    assert "dpex diagnosis of the job: 4 ranks on 1 node, 60 batches each" in printed
    assert "RANK 2 STARVES THE JOB, in all batches" in printed
    assert printed.count("dpex diagnosis of") == 2  # the job's, and that of rank 2
    job = json.loads(report.read_text())["job"]
    assert (job["culprits"], job["missing"], len(job["ranks"])) == ([2], [], 4)
