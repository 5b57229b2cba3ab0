"""What is distributed: the files of wheel and sdist, and dpex at work where only the wheel and its needs are installed.

Ray is not among these needs, so the environment shows as well that nothing local wants it.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("build", reason="needs the dev extra: build")
pytest.importorskip("hatchling", reason="needs the dev extra: hatchling")

import fresh_environment
from fresh_environment import FreshEnvironment

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "tests/fresh_scripts"
DATA_FILES = {
    "dpex/py.typed",
    "dpex/run/sitehook/sitecustomize.py",
    *(f"dpex/telemetry/static/{name}" for name in ("index.html", "page.css", "page.js", "charts.js", "icon.svg")),
    *(f"dpex/telemetry/static/uPlot.{end}" for end in ("iife.min.js", "min.css", "LICENSE.txt")),
}
"""Files that are opened by their names, which no import would miss."""


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The sdist, and the wheel that was built from it."""
    folder = tmp_path_factory.mktemp("dist")
    made = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert made.returncode == 0, made.stdout + made.stderr
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return sdist, wheel


@pytest.fixture(scope="module")
def fresh(distributions: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> FreshEnvironment:
    made = fresh_environment.make(distributions[1], tmp_path_factory.mktemp("fresh"))
    shutil.copytree(SCRIPTS, made.work, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    return made


@pytest.fixture(scope="module")
def session(fresh: FreshEnvironment) -> dict[str, Any]:
    """What a user's script saw in the fresh environment."""
    done = fresh.run("python", "session.py")
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def test_the_wheel_holds_the_package_and_nothing_else(distributions: tuple[Path, Path]) -> None:
    package = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "dpex").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    with zipfile.ZipFile(distributions[1]) as archive:
        names = set(archive.namelist())
    about = {name for name in names if name.startswith("dpex-") and ".dist-info/" in name}
    assert package >= DATA_FILES
    assert names - about == package
    assert {name.partition(".dist-info/")[2] for name in about} == {
        *("METADATA", "WHEEL", "RECORD", "entry_points.txt"),
        *("licenses/LICENSE", "licenses/dpex/telemetry/static/uPlot.LICENSE.txt"),
    }


def test_the_sdist_holds_what_is_needed_to_work_on_dpex(distributions: tuple[Path, Path]) -> None:
    with tarfile.open(distributions[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    top = {name for name in names if "/" not in name}
    assert top >= {"LICENSE", "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "ARCHITECTURE.md"}
    assert top >= {"Makefile", "constraints.txt", "pyproject.toml", ".pre-commit-config.yaml"}
    assert names >= DATA_FILES | {"tests/conftest.py", "benchmarks/__main__.py", "examples/ddp.py", "docs/metrics.md"}
    assert ".github/ISSUE_TEMPLATE/problem.md" in names  # tests/cli/test_about.py reads it
    assert not [name for name in names if name.startswith((".venv", ".git/", "dist/")) or "__pycache__" in name]


def test_the_licence_is_named_and_ray_is_an_extra(distributions: tuple[Path, Path]) -> None:
    about = fresh_environment.metadata_of(distributions[1])
    assert about["License-Expression"] == "Apache-2.0 AND MIT"
    assert "ray" in about.get_all("Provides-Extra", ())
    needs = about.get_all("Requires-Dist", ())
    plain = {one.name for one in fresh_environment.declared(needs)}
    with_ray = {one.name for one in fresh_environment.declared(needs, ["ray"])}
    assert with_ray - plain == {"ray"}
    assert plain == {"cloudpickle", "numpy", "nvidia-ml-py", "prometheus-client", "psutil", "rich", "torch"}


def test_the_fresh_environment_has_no_ray(fresh: FreshEnvironment) -> None:
    asked = "import importlib.util as u; print([u.find_spec(name) for name in ('ray', 'tests', 'benchmarks')])"
    assert fresh.run("python", "-c", asked).stdout.strip() == "[None, None, None]"


def test_the_demo_needs_neither_a_checkout_nor_ray(fresh: FreshEnvironment) -> None:
    shown = fresh.run("dpex", "demo", "--seconds", "8")
    assert shown.returncode == 0, shown.stdout + shown.stderr
    assert re.search(r"^torch, 2 workers +[\d.]+ +\d+%$", shown.stdout, re.MULTILINE)


def test_the_installed_package_is_used(session: dict[str, Any], fresh: FreshEnvironment) -> None:
    assert Path(session["file"]).is_relative_to(fresh.site_packages)
    assert "ray" not in session["modules"]


@pytest.mark.parametrize("name", ["fixed", "if_connected", "tuned"])
def test_local_workers_make_torchs_batches(session: dict[str, Any], name: str) -> None:
    assert session[name]["batches"] == session["torch"]["batches"]
    assert len(session[name]["batches"]) == 10
    assert "Squares" in session[name]["diagnosis"]
    assert session[name]["by_workers"] or name == "tuned"  # batches as small as these may pay without workers


def test_metrics_are_served_and_shown(session: dict[str, Any]) -> None:
    seen = session["observed"]
    assert "dpex_batches_total" in seen["scraped"]
    assert (seen["top_status"], "loader-1" in seen["top"]) == (0, True), seen["top"]


@pytest.mark.parametrize("name", ["on_cluster", "moved"])
def test_the_cluster_asks_for_the_extra(session: dict[str, Any], name: str) -> None:
    assert session[name].startswith("ClusterError: ")
    assert "pip install 'dpex[ray]'" in session[name]


def test_dpex_run_and_diagnose(fresh: FreshEnvironment) -> None:
    for options in (["run", "--num-workers", "2"], ["diagnose"]):
        done = fresh.run("dpex", *options, "stock.py")
        assert (done.returncode, done.stdout.splitlines()[0]) == (0, "squares True"), done.stderr


def test_dpex_run_on_a_cluster_names_the_missing_extra_first(fresh: FreshEnvironment) -> None:
    done = fresh.run("dpex", "run", "--distribute-mode", "true", "stock.py")
    assert (done.returncode, done.stdout) == (2, "")
    assert "pip install 'dpex[ray]'" in done.stderr


def test_a_users_type_checker_sees_the_types(fresh: FreshEnvironment) -> None:
    path = os.pathsep.join((str(fresh.folder / "bin"), os.environ["PATH"]))
    command = [sys.executable, "-m", "pyright", "typed_use.py"]
    environment = os.environ | {"PATH": path}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        command, cwd=fresh.work, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert (done.returncode, done.stdout) == (0, "0 errors, 0 warnings, 0 informations\n"), done.stdout + done.stderr


def _linters_of_make() -> Iterator[str]:
    told_by_make = {"MAKEFLAGS", "MFLAGS", "MAKELEVEL", "VENV"}
    told = subprocess.run(
        ["make", "--dry-run", "--old-file=.venv/.dpex-installed", "lint"],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name not in told_by_make},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    yield from (line for line in told.stdout.splitlines() if ".venv/bin" in line)


def test_pre_commit_runs_the_linters_of_make_lint() -> None:
    repos = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert [repo["repo"] for repo in repos] == ["local"]  # nothing is fetched
    hooks = repos[0]["hooks"]
    assert [hook["entry"] for hook in hooks] == list(_linters_of_make())
    assert {(hook["language"], hook["pass_filenames"]) for hook in hooks} == {("system", False)}


def test_what_contributors_are_told_to_open_is_there() -> None:
    named = re.findall(r"(?:dpex|tests|benchmarks|dashboards)/[\w./-]*\w", (ROOT / "CONTRIBUTING.md").read_text())
    assert len(named) > 20
    assert [path for path in named if not (ROOT / path).exists()] == []
