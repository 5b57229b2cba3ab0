"""A test that is skipped for want of a program is a failure where everything is required."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
CASES = """
import pytest

@pytest.mark.skipif(True, reason="prometheus is not installed")
def test_marked():
    raise AssertionError

def test_called():
    pytest.skip("openssl makes the certificate and is not installed")

@pytest.mark.skipif(True, reason="needs a CUDA device")
def test_gpu():
    raise AssertionError

@pytest.mark.xfail(reason="a known miss")
def test_expected_to_fail():
    raise AssertionError

def test_plain():
    pass
"""
WHOLE_MODULE = "import pytest\npytest.importorskip('no_such_package_as_this')\ndef test(): pass\n"


def run(folder: Path, text: str, switch: str | None) -> tuple[int, str]:
    (folder / "test_cases.py").write_text(text)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("DPEX_", "PYTEST_"))}
    environment |= {"PYTHONPATH": str(TESTS)} | ({} if switch is None else {"DPEX_TEST_REQUIRE": switch})
    command = [sys.executable, "-m", "pytest", "-p", "skips", "-p", "no:cacheprovider", "--rootdir", str(folder), "-q"]
    done = subprocess.run([*command, str(folder)], capture_output=True, text=True, env=environment, timeout=60)
    return done.returncode, done.stdout + done.stderr


def test_by_default_skips_are_skips(tmp_path: Path) -> None:
    code, text = run(tmp_path, CASES, None)
    assert (code, "1 passed, 3 skipped, 1 xfailed" in text) == (0, True), text


def test_where_everything_is_required_only_the_machine_excuses_a_skip(tmp_path: Path) -> None:
    code, text = run(tmp_path, CASES, "all")
    assert (code, "1 failed, 1 passed, 1 skipped, 1 xfailed, 1 error" in text) == (1, True), text
    assert "Skipped: openssl makes the certificate and is not installed" in text
    assert "prometheus is not installed\nUnder DPEX_TEST_REQUIRE=all it must run: install what it needs" in text


@pytest.mark.parametrize(("switch", "code", "said"), [(None, 5, "1 skipped"), ("all", 2, "no_such_package_as_this")])
def test_a_module_that_is_skipped_as_a_whole(tmp_path: Path, switch: str | None, code: int, said: str) -> None:
    got, text = run(tmp_path, WHOLE_MODULE, switch)
    assert (got, said in text) == (code, True), text


def test_a_value_that_means_nothing_is_refused(tmp_path: Path) -> None:
    code, text = run(tmp_path, CASES, "some")
    assert (code, "DPEX_TEST_REQUIRE='some': set it to \"all\", or leave it unset" in text) == (4, True), text
