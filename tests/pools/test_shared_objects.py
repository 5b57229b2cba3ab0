"""The search for objects to share, on each version of Python that has immortal objects: see `shared_object_cases`."""

import functools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dpex.pools.local.shared_objects import why_unsupported
from tests.pools import shared_object_cases

VERSIONS = ("3.12", pytest.param("3.13", marks=pytest.mark.long), "3.14")
ROOT = Path(__file__).parents[2]


def _runs(python: Path, code: str) -> bool:
    return python.exists() and not subprocess.run([python, "-c", code], capture_output=True).returncode


def _interpreters(version: str) -> list[Path]:
    """Return the interpreters of this version: this one, the one on the path, and pyenv's."""
    name = f"python{version}"
    found = [Path(sys.executable)] if sys.version_info[:2] == tuple(map(int, version.split("."))) else []
    found += [Path(path) for path in [shutil.which(name)] if path]
    found += sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/{name}"))
    return [python for python in found if _runs(python, "import ctypes")]


@functools.cache
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


def run(request: pytest.FixtureRequest, version: str, *arguments: str) -> str:
    python = interpreter(version, request.config.cache.mkdir(f"numpy-{version}"))  # type: ignore[union-attr]
    command = [python, "-m", shared_object_cases.__name__, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": ""})
    assert not done.returncode, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def errors() -> dict[str, dict[str, str]]:
    return {}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", shared_object_cases.CASES)
def test_case(request: pytest.FixtureRequest, errors: dict[str, dict[str, str]], version: str, name: str) -> None:
    if version not in errors:
        errors[version] = json.loads(run(request, version))
    assert not errors[version][name], errors[version][name]


@pytest.mark.parametrize("version", VERSIONS)
def test_program_with_shared_objects_ends(request: pytest.FixtureRequest, version: str) -> None:
    run(request, version, "end")


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="this Python has immortal objects")
def test_older_python_says_why_it_shares_nothing() -> None:
    assert "Python 3.12" in why_unsupported()
