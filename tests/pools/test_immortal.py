"""Workers that share the plain objects of the dataset: `immortal_cases`, on each Python that this machine has."""

import functools
import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dpex import DpexDataLoader, WorkerConfig
from dpex.pools.local.immortal import share_plain_objects
from dpex.system import user_warnings
from tests.pools import immortal_cases

VERSIONS = ("3.12", pytest.param("3.13", marks=pytest.mark.long), "3.14")
ROOT = Path(__file__).parents[2]
IS_OLD = sys.version_info < (3, 12)


def _runs(python: Path, code: str) -> bool:
    return python.exists() and not subprocess.run([python, "-c", code], capture_output=True).returncode


def _interpreters(version: str) -> list[Path]:
    """Return the interpreters of this version: this one, the one on the path, and pyenv's."""
    name = f"python{version}"
    found = [Path(sys.executable)] if sys.version_info[:2] == tuple(map(int, version.split("."))) else []
    found += [Path(path) for path in [shutil.which(name)] if path]
    found += sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/{name}"))
    return [python for python in found if _runs(python, "import ctypes")]


def interpreter(version: str, folder: Path) -> Path:
    """Return an interpreter that has NumPy. Without one, NumPy is installed into an environment in ``folder``."""
    found = _interpreters(version)
    if not found:
        pytest.skip(f"this machine has no Python {version}")
    for python in [*found, folder / "bin/python"]:
        if _runs(python, "import numpy"):
            return python
    subprocess.run([found[0], "-m", "venv", folder], check=True)
    subprocess.run([folder / "bin/python", "-m", "pip", "install", "--quiet", "numpy"], check=True)
    return folder / "bin/python"


@functools.cache
def errors(version: str, folder: Path) -> dict[str, str]:
    command = [interpreter(version, folder), "-m", immortal_cases.__name__]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": ""})
    assert not done.returncode, done.stderr
    found: dict[str, str] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", immortal_cases.CASES)
def test_case(request: pytest.FixtureRequest, version: str, name: str) -> None:
    error = errors(version, Path(request.config.cache.mkdir(f"numpy-{version}")))[name]  # type: ignore[union-attr]
    assert not error, error


@pytest.mark.skipif(not IS_OLD, reason="this Python has immortal objects")
def test_older_python_shares_nothing_and_says_why() -> None:
    rows = immortal_cases.rows(3)
    assert "writes the reference count of each object" in share_plain_objects(rows)
    assert sys.getrefcount(rows[0]) < 5


@pytest.mark.parametrize("shares", [True, False])
def test_an_epoch_says_if_each_worker_copies_objects(
    shares: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "dpex")
    monkeypatch.setattr(user_warnings, "_said", set())
    config = WorkerConfig(share_objects=shares)
    with DpexDataLoader(immortal_cases.rows(400), num_workers=2, collate_fn=list, worker_config=config) as loader:
        for _ in range(2):
            assert [batch[0]["label"] for batch in loader] == list(range(1000, 1400))
    told = [record.getMessage() for record in caplog.records if "copies the Python objects" in record.getMessage()]
    assert len(told) == (IS_OLD and shares)
    assert not told or "each worker copies the Python objects of the dataset that it reads: Python 3.1" in told[0]
