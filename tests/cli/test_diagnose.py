"""``dpex diagnose``: the cause of the wait, the report and its files. `test_run_training` has what the scripts see."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.cli.commands import dpex


@pytest.mark.parametrize("source", ["", "raise SystemExit(0)"])
def test_script_without_a_loader_gets_a_line(source: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(source)
    done = dpex("diagnose", "script.py", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "dpex diagnose: no DataLoader was iterated in this process\n")


@pytest.mark.parametrize("words", [("nothing.py",), ("-m", "nothing")])
def test_missing_script_is_the_only_error(words: tuple[str, ...], tmp_path: Path) -> None:
    done = dpex("diagnose", *words, cwd=tmp_path)
    assert done.returncode
    assert len(done.stderr.splitlines()) == 1
    assert "nothing" in done.stderr


def test_arguments_of_the_script_come_after_it(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("")
    done = dpex("diagnose", "--epochs", "1", "script.py", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.endswith("unrecognized arguments: --epochs; arguments of the script come after SCRIPT\n")


@pytest.mark.parametrize("status", [0, 1, 2])
def test_options_after_a_script_that_refuses_them_are_named(status: int, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(f"raise SystemExit({status})")
    done = dpex("diagnose", "script.py", "--epochs", "3", "--html=a.html", cwd=tmp_path)
    assert done.returncode == status
    assert ("--html=a.html stands after the script" in done.stderr) == (status == 2)
    assert ("dpex diagnose --html=a.html ..." in done.stderr) == (status == 2)


def diagnosed(tmp_path: Path, *words: str) -> dict[str, Any]:
    done = dpex("diagnose", "--json", str(tmp_path / "out.json"), *words)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("total ")
    found: dict[str, Any] = json.loads((tmp_path / "out.json").read_text())
    return found


@pytest.mark.alone
def test_the_cause_is_found(tmp_path: Path) -> None:
    """`diagnose/test_planted.py` has all causes. Here are two workers, samples of 30 ms and steps of 2 ms."""
    found = diagnosed(tmp_path, "waits.py", "2", "0.03", "0", "0.002")
    assert found["verdict"]["cause"] == "storage", found
    assert found["facts"]["pools"]["local"]["tickets"] == found["facts"]["batches"]
    assert found["facts"]["batch_bytes"] == 24
    names = [one["name"] for one in found["facts"]["calls"]]
    assert names[:2] == ["load", "load > Samples.__getitem__"]


@pytest.mark.long
@pytest.mark.parametrize("kind", ["Stream", "Spawned"])
def test_streams_and_spawned_workers_are_counted_too(kind: str, tmp_path: Path) -> None:
    found = diagnosed(tmp_path, "waits.py", "1", "0.02", "0", "0.002", "60", kind)
    shares = {cause: share for cause, share in found["verdict"]["shares"].items() if cause != "startup"}
    assert max(shares, key=shares.__getitem__) == "storage"
    assert found["verdict"]["cause"] in ("storage", "mixed", *["startup"] * (kind == "Spawned")), found
    assert found["facts"]["pools"]["local"]["load_s"] >= 2.4


def test_the_report_fits_one_screen_and_ends_with_its_advice() -> None:
    done = dpex("diagnose", "waits.py", "0", "0.02", "0", "0.001")
    line, _, title, *lines, command = done.stderr.splitlines()
    assert line.startswith("dpex diagnose: a DataLoader of a Samples: 0 workers, wait ")
    assert len(lines) < 24
    assert "How do we know" not in done.stderr
    assert title.startswith("dpex diagnosis of loader (Samples, batch size 2): 60 batches")
    assert "STORAGE-BOUND READING" in done.stderr
    told = " ".join(done.stderr.split())
    assert re.search(
        r"First: num_workers=\d+ instead of 0(?: \(\d+ with persistent_workers=True: [^)]*\))?: "
        r"[\d.]+ batches/s \(.*?\) instead of [\d.]+, and a wait",
        told,
    )
    assert command == "  dpex run --also-in-process waits.py 0 0.02 0 0.001"


def test_another_rank_writes_only_a_file_of_its_own(tmp_path: Path) -> None:
    page, one = tmp_path / "page-{rank}.html", tmp_path / "one.json"
    words = ("waits.py", "0", "0", "0", "0.001", "5")
    done = dpex("diagnose", "--html", str(page), "--json", str(one), *words, env={"RANK": "3"})
    assert done.stderr == ""  # rank 0 speaks
    (written,) = tmp_path.iterdir()
    assert written.name == "page-3.html"
    assert "Let training run for longer" in written.read_text()


@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.long), 2])
def test_a_loader_of_dpexs_class_is_reported_on_too(workers: int, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "from dpex import DpexDataLoader\n"
        "if __name__ == '__main__':\n"
        f"    loader = DpexDataLoader(range(40), num_workers={workers}, batch_size=4)\n"
        "    list(loader)\n"
        "    loader.close()\n"
        "    del loader\n"
    )
    done = dpex("diagnose", "--html", "out.html", "script.py", cwd=tmp_path)
    assert done.stderr.count("dpex diagnosis of") == 1
    assert f"a DpexDataLoader (dpex) of a range: {workers} workers, 10 batches" in done.stderr
    assert [path.name for path in tmp_path.glob("*.html")] == ["out.html"]


def test_loaders_made_anew_count_as_one_and_others_apart(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "from torch.utils.data import DataLoader\n"
        "def read(samples):\n"
        "    for _ in DataLoader(range(samples), num_workers=1, batch_size=2):\n"
        "        pass\n"
        "if __name__ == '__main__':\n"
        "    for epoch in range(3):\n"
        "        read(200)\n"
        "        read(20)\n"
    )
    done = dpex("diagnose", "--json", "{rank}.json", "script.py", cwd=tmp_path)
    found = [json.loads((tmp_path / name).read_text())["facts"] for name in ("0.json", "0-2.json")]
    assert [(one["batches"], one["passes"]) for one in found] == [(300, 3), (30, 3)]
    assert "300 batches" in done.stderr


def test_a_loader_of_dpexs_class_is_told_how_it_is_tuned(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import time\n"
        "from dpex import DpexDataLoader\n"
        "class Slow:\n"
        "    def __len__(self):\n"
        "        return 200\n"
        "    def __getitem__(self, index):\n"
        "        time.sleep(0.01)\n"
        "        return index\n"
        "if __name__ == '__main__':\n"
        "    list(DpexDataLoader(Slow(), num_workers=1, batch_size=2))\n"
    )
    done = dpex("diagnose", "script.py", cwd=tmp_path)
    assert done.stderr.endswith("during training, give the DpexDataLoader num_workers='auto'.\n")


@pytest.mark.long
def test_the_folder_of_a_report_is_made(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "x.json"
    assert dpex("diagnose", "--json", str(path), "waits.py", "0", "0", "0", "0", "5").returncode == 0
    assert path.exists()


@pytest.mark.long
def test_a_place_that_cannot_be_written_to_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = dpex("diagnose", "--json", str(tmp_path / "file" / "x.json"), "waits.py", "0", "0", "0", "0", "5")
    assert done.returncode == 0
    assert "cannot be written" in done.stderr
