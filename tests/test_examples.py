"""The examples, with this machine's workers and small limits.

Most are forked from one process that has imported torch. The two that train for some seconds run as people run them.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from trainers import Forker

pytestmark = pytest.mark.timeout(300)
EXAMPLES = Path(__file__).parent.parent / "examples"


Run = Callable[..., tuple[str, str]]
ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "COLUMNS": "80"}


def start(name: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    """Run an example in an interpreter of its own."""
    return subprocess.Popen(
        [sys.executable, str(EXAMPLES / name), *arguments],
        env={**os.environ, **ENVIRONMENT, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def printed(example: subprocess.Popen[str]) -> tuple[str, str]:
    """Return what the example printed, and what it printed to stderr. It must end with 0."""
    out, err = example.communicate(timeout=280)
    return checked(example.returncode, out, err)


def checked(code: int, out: str, err: str) -> tuple[str, str]:
    assert code == 0, err[-2000:]
    assert "Traceback" not in err
    return out, err


@pytest.fixture(scope="module")
def auto() -> Iterator[subprocess.Popen[str]]:
    """Trains for some seconds while the other examples run."""
    example = start("auto.py", "--seconds", "16")
    yield example
    example.kill()
    example.communicate()


@pytest.fixture(scope="module")
def forker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forker]:
    made = Forker(
        tmp_path_factory.mktemp("examples"), "import runpy\nimport PIL.Image, sklearn.datasets\n", **ENVIRONMENT
    )
    yield made
    made.close()


@pytest.fixture
def run(auto: subprocess.Popen[str], forker: Forker) -> Iterator[Run]:
    """Run an example. Return what it printed, and what it printed to stderr."""

    def run(name: str, *arguments: str) -> tuple[str, str]:
        path = str(EXAMPLES / name)
        body = f"sys.path.insert(0, {str(EXAMPLES)!r})\nsys.argv = {[path, *arguments]!r}\n"
        return checked(*forker.run(f"{body}runpy.run_path({path!r}, run_name='__main__')\n"))

    yield run
    forker.clear()


def test_single_device(run: Run) -> None:
    out, _ = run("single_device.py", "--local", "--num-workers", "2", "--epochs", "2", "--limit", "3")
    assert re.findall(r"epoch (\d): (\d+) images, loss [\d.]+, accuracy [\d.]+%", out) == [("1", "300"), ("2", "300")]


def test_feed_falls_back_to_the_cpu(run: Run) -> None:
    out, _ = run("feed.py", "--limit", "3")
    assert re.findall(r"epoch (\d): (\d+) images on cpu, loss [\d.]+", out) == [("1", "300"), ("2", "300")]
    assert re.search(r"the device transform took \d+\.\d\d ms per batch", out)


def test_data_parallel(run: Run) -> None:
    out, err = run("data_parallel.py", "--local", "--num-workers", "2", "--epochs", "2")
    lines = [f"epoch {epoch}: input (30, 5), output (30, 2)" for epoch in (1, 2)]
    assert (out.splitlines(), err) == (lines, "")


def test_ddp_shows_every_row_once_and_another_order_each_epoch(run: Run) -> None:
    out, _ = run("ddp.py", "--local", "--num-workers", "2", "--epochs", "2", "--rows", "120", "--ranks", "2")
    said = re.findall(r"epoch (\d): each of 120 rows was seen once; rank 0 began with rows \[([\d, ]+)\]", out)
    assert [epoch for epoch, _ in said] == ["1", "2"]
    assert said[0][1] != said[1][1]


@pytest.mark.long
def test_ddp_with_a_limit_stops_half_way_in_every_rank(run: Run) -> None:
    out, _ = run("ddp.py", "--local", "--num-workers", "1", "--rows", "200", "--limit", "20")
    assert "seen were 160 rows 0 times, 40 rows 1 times" in out


def test_an_error_in_the_dataset_reaches_the_loop(run: Run) -> None:
    out, _ = run("dataset_error.py", "--local", "--num-workers", "2")
    assert "The training loop caught a ZeroDivisionError" in out
    assert "Caught ZeroDivisionError in DataLoader worker process 0." in out
    assert "return torch.tensor(index / 0)" in out


def test_deleting_loaders_half_way_leaves_nothing(run: Run) -> None:
    out, _ = run("delete_loader.py", "--local", "--num-workers", "3", "--limit", "2")
    assert re.search(r"2 batches were taken to train and 1 to test\. Held now: .*process: [1-9]", out)
    assert re.search(r"The test loader went on with [1-9]\d* more batches\.", out)
    assert "The test loader was deleted. Left behind: nothing." in out


def test_a_set_of_two_shards_is_decoded_by_as_many_as_pay(run: Run) -> None:
    out, _ = run("few_shards.py", "--seconds", "2", "--decode-ms", "5")
    assert re.search(r"torch, 8 workers: [\d.]+ batches/s", out)
    assert re.search(r'dpex, num_workers="auto": [\d.]+ batches/s, [12] streams, \d+ workers decode', out)
    assert "Other workers, whose number is tuned, decode what is read" in out


def test_planted_bottlenecks_are_diagnosed(run: Run) -> None:
    out, _ = run("bottlenecks.py", "--seconds", "3", "straggler", "transfer")
    assert re.findall(r"^dpex diagnosis of (\w+) ", out, re.MULTILINE) == ["straggler", "transfer"]
    assert out.count("First: ") == 2


def test_a_pool_of_threads_makes_torchs_batches(run: Run) -> None:
    out, _ = run("thread_pool.py")
    assert "the same batches" in out


def test_auto_stopped_by_ctrl_c_shows_what_it_saw() -> None:
    started = start("auto.py", "--seconds", "60")
    assert started.stdout is not None
    assert any("batches/s" in line for line in started.stdout)
    started.send_signal(signal.SIGINT)
    out, err = started.communicate(timeout=60)
    assert started.returncode == 130
    assert re.search(r"Stopped\.\n(.*\n)+ +2 workers ", out)
    assert err == ""


def test_auto_shows_what_it_decides_and_why(auto: subprocess.Popen[str]) -> None:
    out, _ = printed(auto)
    told = " ".join(out.split())
    assert re.search(
        r"Decision 1: From .* to .*, because the training loop waits for data for [1-9]\d? % of the time", told
    )
    assert re.search(r"[█·]{24}  wait +\d+%  +[\d.]+ batches/s  +\d+ workers", out)
    rows = re.findall(r"^ +(2 workers|auto) +(\d+) ms +(\d+) ms +[\d.]+ +\d+% +\d+% +\d+ *$", out, re.MULTILINE)
    assert [row[0] for row in rows] == ["2 workers"] * 2 + ["auto"] * 3
    assert [row[1:] for row in rows[:2]] == [row[1:] for row in rows[2:4]]


SAME = r"✓ All \d+ batches are those of part 2, bit for bit \(SHA-256 [0-9a-f]{12}\.\.\.\)\."


@pytest.mark.alone
def test_the_demo_makes_the_same_batches_on_ray() -> None:
    out, err = printed(start("demo.py", "--seconds", "12"))
    told = " ".join(out.split())
    assert re.search(r"1\. PyTorch's DataLoader, .* 2\. DpexDataLoader, .* 3\. .* on Ray .* 4\. Why", told)
    assert re.search(
        r"Decision 1: From .* to .*, because the training loop waits for data for [1-9]\d? % of the time", told
    )
    assert re.search(r"http://127\.0\.0\.1:\d+/ until the demo ends\. It answered just now with status 200", told)
    assert len(re.findall(SAME, told)) == 2
    assert "│ dpex diagnosis of ray (Tiles, batch size 32)" in out
    assert re.search(
        r'"auto" made [\d.]+ in its last \d+ seconds, with \d+ workers?, and the loop waited for \d+%: ', told
    )
    assert "\x1b" not in out + err
    assert all(len(line) <= 80 for line in out.splitlines())


@pytest.mark.long
def test_the_demo_says_what_it_leaves_out_without_ray(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['ray'] = None\n")
    out, _ = printed(start("demo.py", "--seconds", "6", PYTHONPATH=str(tmp_path)))
    told = " ".join(out.split())
    assert "Ray is not installed, so this part runs without it: pip install 'dpex[ray]' adds it." in told
    assert len(re.findall(SAME, told)) == 2
