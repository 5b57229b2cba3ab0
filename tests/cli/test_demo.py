"""`dpex demo`, shortened: what it shows, and how it ends on Ctrl-C."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys

import pytest

from dpex.cli.main import main

pytestmark = [pytest.mark.alone, pytest.mark.timeout(200)]
ENVIRONMENT = {**os.environ, "COLUMNS": "80", "PYTHONWARNINGS": "ignore", "PYTHONUNBUFFERED": "1"}


def start(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "dpex", "demo", *arguments]
    return subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.long
def test_the_demo_compares_auto_with_torch_and_explains_it() -> None:
    demo = start("--seconds", "16")
    out, err = demo.communicate(timeout=180)
    told = " ".join(out.split())
    assert demo.returncode == 0, err
    assert re.search(r"the live page and the metrics are at http://127\.0\.0\.1:\d+/", err)
    assert re.search(r"From 2 local workers \(prefetch \d+\) to \d+ local workers", told)
    assert re.search(r"\"auto\" found \d+ workers: [\d.]+ batches/s \([\d.]+ times as many\) and \d+%\.", told)
    assert "dpex diagnosis of demo (StoredImages, batch size 8)" in told
    report = out[out.index("dpex diagnosis of demo") :].partition("\nloader ")[0]
    assert max(map(len, report.splitlines())) <= 80
    assert not re.search(r"\n(?:  - | {4})?\S+ ?\S*\n(?! *\n|  - )", report)  # no line of two words above others
    assert re.search(r"^torch, 2 workers +[\d.]+ +\d+%$", out, re.MULTILINE)
    assert "\x1b" not in out + err


def test_ctrl_c_ends_it_without_a_traceback() -> None:
    demo = start()
    assert demo.stdout is not None
    assert any("batches/s" in line for line in demo.stdout)
    demo.send_signal(signal.SIGINT)
    out, err = demo.communicate(timeout=60)
    assert (demo.returncode, out.splitlines()[-1]) == (130, "Stopped.")
    assert "Traceback" not in err


@pytest.mark.parametrize("seconds", ["0", "-3", "nan", "inf", "long"])
def test_a_time_that_is_none_is_refused(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["demo", "--seconds", seconds])
    assert "argument --seconds" in capsys.readouterr().err
