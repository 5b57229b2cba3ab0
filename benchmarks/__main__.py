"""`python -m benchmarks`: measure the rows, print the table, write JSON."""

import argparse
import json
import os
import sys
from dataclasses import asdict, replace
from datetime import datetime, timezone
from pathlib import Path

from benchmarks.machine import machine, versions
from benchmarks.report import as_json, markdown, text
from benchmarks.rows import ROWS, Row
from benchmarks.runner import MeasurementError, Result, Settings, run_row

RESULTS = Path(__file__).resolve().parent / "results"


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    keys = [row.key for row in ROWS]
    parser.add_argument("--rows", nargs="+", choices=keys, default=keys, metavar="ROW", help=", ".join(keys))
    parser.add_argument("--quick", action="store_true", help="a first look: 2 rounds of 1 s")
    parser.add_argument("--repeats", type=int, metavar="N", help="rounds (5, or 2 when quick)")
    parser.add_argument("--window-s", type=float, metavar="S", help="seconds per measurement (3, or 1 when quick)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where results go (benchmarks/results/local-*.json)")
    parser.add_argument("--markdown", action="store_true", help="print a Markdown table at the end")
    return parser.parse_args(arguments)


def settings_of(options: argparse.Namespace) -> Settings:
    settings = Settings.quick() if options.quick else Settings()
    chosen = {"rounds": options.repeats, "window_s": options.window_s}
    return replace(settings, **{name: value for name, value in chosen.items() if value is not None})


def say(line: str) -> None:
    """Progress: overwritten on a terminal, silent elsewhere."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)


def measure(row: Row, settings: Settings) -> Result | None:
    """The row's result, printed; None, with the reason printed, if it could not be measured."""
    try:
        result = run_row(row, settings, say)
    except MeasurementError as error:
        say("")
        print(f"{row.title}\n    could not be measured: {error}\n", flush=True)
        return None
    say("")
    print(text(result), end="\n\n", flush=True)
    return result


def write(path: Path, settings: Settings, host: dict[str, object], results: list[Result], failed: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {
        "when": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": host,
        "versions": versions(),
        "settings": asdict(settings),
        "rows": [as_json(result) for result in results],
        "failed": failed,
    }
    path.write_text(json.dumps(document, indent=1) + "\n")
    print(f"written to {os.path.relpath(path)}")


def main(arguments: list[str]) -> int:
    """0 if every row was measured, whether or not its target was met; else 1."""
    options = parse(arguments)
    settings, host = settings_of(options), machine()
    print(
        f"{host['processor']}, {host['cores']} cores; {settings.rounds} rounds of {settings.window_s:g} s;",
        end=" ",
    )
    print("median (lowest to highest round), batches per second\n", flush=True)
    if host["load_1min"] > 0.5:
        print(f"note: other work runs on this machine (load {host['load_1min']}); figures will be noisy\n")
    outcomes = {row.key: measure(row, settings) for row in ROWS if row.key in options.rows}
    results = [result for result in outcomes.values() if result is not None]
    failed = [key for key, result in outcomes.items() if result is None]
    if options.markdown:
        print(markdown(results), end="\n\n")
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    write(options.json or RESULTS / f"local-{stamp}.json", settings, host, results, failed)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
