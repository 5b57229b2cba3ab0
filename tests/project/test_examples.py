"""The examples, with this machine's workers and small limits, each forked from one process that has imported torch."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from trainers import Forker

pytestmark = pytest.mark.timeout(300)
EXAMPLES = Path(__file__).parents[2] / "examples"


Run = Callable[..., tuple[str, str]]
ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "COLUMNS": "80"}


def checked(code: int, out: str, err: str) -> tuple[str, str]:
    assert code == 0, err[-2000:]
    assert "Traceback" not in err
    return out, err


@pytest.fixture(scope="module")
def forker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forker]:
    made = Forker(
        tmp_path_factory.mktemp("examples"), "import runpy\nimport PIL.Image, sklearn.datasets\n", **ENVIRONMENT
    )
    yield made
    made.close()


@pytest.fixture
def run(forker: Forker) -> Iterator[Run]:
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


@pytest.mark.long
def test_ddp_shows_every_row_once_and_another_order_each_epoch(run: Run) -> None:
    out, _ = run("ddp.py", "--local", "--num-workers", "2", "--epochs", "2", "--rows", "120", "--ranks", "2")
    said = re.findall(r"epoch (\d): each of 120 rows was seen once; rank 0 began with rows \[([\d, ]+)\]", out)
    assert [epoch for epoch, _ in said] == ["1", "2"]
    assert said[0][1] != said[1][1]


@pytest.mark.long
def test_ddp_with_a_limit_stops_half_way_in_every_rank(run: Run) -> None:
    out, _ = run("ddp.py", "--local", "--num-workers", "1", "--rows", "6000", "--limit", "20")
    assert "seen were 2000 rows 0 times, 4000 rows 1 times" in out


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
    out, _ = run("few_shards.py", "--seconds", "1", "--decode-ms", "5")
    assert re.search(r"torch, 8 workers: [\d.]+ batches/s", out)
    assert re.search(r'dpex, num_workers="auto": [\d.]+ batches/s, [12] streams, \d+ workers decode', out)
    assert "Other workers, whose number is tuned, decode the samples" in out


def test_planted_bottlenecks_are_diagnosed(run: Run) -> None:
    out, _ = run("bottlenecks.py", "--seconds", "1", "straggler", "transfer")
    assert re.findall(r"^dpex diagnosis of (\w+) ", out, re.MULTILINE) == ["straggler", "transfer"]
    assert out.count("First: ") == 2


def test_a_pool_of_threads_makes_torchs_batches(run: Run) -> None:
    out, _ = run("thread_pool.py")
    assert "the same batches" in out


def test_async_http_reads_each_file_once(run: Run) -> None:
    out, _ = run("async_http.py", "--num-workers", "2", "--files", "200", "--concurrency", "16")
    assert f"200 files, checksum {sum(range(200))}, in" in out
