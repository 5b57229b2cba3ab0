"""Does `dpex run` bring what `dpex diagnose` says it would? `python -m benchmarks.unmodified`.

A plain script runs below `dpex diagnose`, which leaves PyTorch's loader in place and predicts; then below `dpex run`,
which tunes. Compared are the wait and the rate predicted with those that the script itself saw, in its second half.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).with_name("plain.py")
CASES = (
    ("waits, 2 workers", 0.010, 0.0005, 0.020, 2),
    ("waits long, 4 workers", 0.020, 0.0, 0.010, 4),
    ("computes, 1 worker", 0.0, 0.004, 0.020, 1),
    ("waits and computes, 1 worker", 0.004, 0.002, 0.030, 1),
    ("computes little, in-process", 0.0, 0.0005, 0.004, 0),
    ("long steps, 2 workers", 0.002, 0.0, 0.060, 2),
)
"""Name, seconds a sample waits, its CPU seconds, seconds of a step, workers."""


def main(arguments: Sequence[str] | None = None) -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description="What dpex diagnose predicts, and what dpex run then brings.")
    parser.add_argument(
        "--seconds", type=float, default=6.0, help="of the diagnosed run; the other takes twice that (6)"
    )
    seconds = parser.parse_args(arguments).seconds
    print(f"{'script':30}{'as it is':>18}{'predicted':>18}{'dpex run':>18}   off by")
    off = []
    for name, *numbers in CASES:
        before, predicted = _diagnosed([*numbers, seconds])
        after = _printed(_dpex("run", "--also-in-process", str(SCRIPT), *map(str, [*numbers, 2 * seconds])))
        off.append(100 * abs(predicted[1] - after[1]))
        print(f"{name:30}{_shown(*before)}{_shown(*predicted)}{_shown(*after)}{off[-1]:9.1f}", flush=True)
    print(f"\nthe wait is off by {sum(off) / len(off):.1f} points on average, {max(off):.1f} at most")


def _diagnosed(numbers: Sequence[float]) -> tuple[tuple[float, float], tuple[float, float]]:
    """Rate and wait that the script saw, and that dpex would give."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        done = _dpex("diagnose", "--json", str(report), "--no-probe", str(SCRIPT), *map(str, numbers))
        told: dict[str, Any] = json.loads(report.read_text())
    found = told["with_dpex"] or told["what_if"]
    if found is None:
        raise SystemExit("nothing was predicted: --seconds is too short")
    return _printed(done), (found["rate"], found["wait"])


def _dpex(*words: str) -> str:
    command = [sys.executable, "-m", "dpex", *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _printed(text: str) -> tuple[float, float]:
    rate, wait = map(float, text.split()[-2:])
    return rate, wait


def _shown(rate: float, wait: float) -> str:
    return f"{rate:10.1f}/s {wait:5.0%}"


if __name__ == "__main__":
    main()
