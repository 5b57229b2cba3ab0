"""`python -m benchmarks`: measure the rows, print the table, write JSON."""

import argparse
import json
import os
import sys
from dataclasses import asdict, replace
from datetime import datetime, timezone
from pathlib import Path

from benchmarks import autoreport
from benchmarks.autorunner import run_auto_row
from benchmarks.machine import machine, versions
from benchmarks.oracle import AUTO_ROWS, AutoResult, AutoRow
from benchmarks.process import MeasurementError
from benchmarks.report import as_json, markdown, text
from benchmarks.rows import ROWS, Row
from benchmarks.runner import Result, Settings, run_row

ALL_ROWS: tuple[Row | AutoRow, ...] = (*ROWS, *AUTO_ROWS)
GROUPS = {"fixed": [row.key for row in ROWS], "auto": [row.key for row in AUTO_ROWS]}
RESULTS = Path(__file__).resolve().parent / "results"


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    keys = [*GROUPS, *(row.key for row in ALL_ROWS)]
    parser.add_argument("--rows", nargs="+", choices=keys, default=[*GROUPS], metavar="ROW", help=", ".join(keys))
    parser.add_argument("--quick", action="store_true", help="a first look: 2 rounds of 1 s; auto: 1 round of 4 s")
    parser.add_argument("--repeats", type=int, metavar="N", help="rounds (5, or 2 when quick)")
    parser.add_argument("--window-s", type=float, metavar="S", help="seconds per measurement (3, or 1 when quick)")
    parser.add_argument("--auto-repeats", type=int, metavar="N", help="rounds of the auto rows (1)")
    parser.add_argument("--auto-window-s", type=float, metavar="S", help="seconds of each there (20, or 4 when quick)")
    parser.add_argument("--full", action="store_true", help="auto rows: measure all fixed counts at full length")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where results go (benchmarks/results/local-*.json)")
    parser.add_argument("--markdown", action="store_true", help="print a Markdown table at the end")
    return parser.parse_args(arguments)


def settings_of(options: argparse.Namespace) -> Settings:
    settings = Settings.quick() if options.quick else Settings()
    chosen = {
        "rounds": options.repeats,
        "window_s": options.window_s,
        "auto_rounds": options.auto_repeats,
        "auto_window_s": options.auto_window_s,
        "screen_s": 0.0 if options.full else None,
    }
    return replace(settings, **{name: value for name, value in chosen.items() if value is not None})


def say(line: str) -> None:
    """Progress: overwritten on a terminal, silent elsewhere."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)


def measure(row: Row | AutoRow, settings: Settings, cores: int) -> Result | AutoResult | None:
    """The row's result, printed; None, with the reason printed, if it could not be measured."""
    result: Result | AutoResult
    try:
        result = run_auto_row(row, settings, cores, say) if isinstance(row, AutoRow) else run_row(row, settings, say)
    except MeasurementError as error:
        say("")
        print(f"{row.title}\n    could not be measured: {error}\n", flush=True)
        return None
    say("")
    print(autoreport.text(result) if isinstance(result, AutoResult) else text(result), end="\n\n", flush=True)
    return result


def print_markdown(results: list[Result | AutoResult]) -> None:
    """A table for each of the two kinds of rows."""
    fixed = [result for result in results if isinstance(result, Result)]
    auto = [result for result in results if isinstance(result, AutoResult)]
    tables = ([markdown(fixed)] if fixed else []) + ([autoreport.markdown(auto)] if auto else [])
    print(*tables, sep="\n\n", end="\n\n")


def write(
    path: Path, settings: Settings, host: dict[str, object], results: list[Result | AutoResult], failed: list[str]
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {
        "when": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": host,
        "versions": versions(),
        "settings": asdict(settings),
        "rows": [autoreport.as_json(r) if isinstance(r, AutoResult) else as_json(r) for r in results],
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
    print("median (lowest to highest round), batches per second")
    print(f"auto rows: {settings.auto_rounds} x {settings.auto_window_s:g} s each, from iter() on\n", flush=True)
    if host["load_1min"] > 0.5:
        print(f"note: other work runs on this machine (load {host['load_1min']}); figures will be noisy\n")
    wanted = {key for name in options.rows for key in GROUPS.get(name, [name])}
    outcomes = {row.key: measure(row, settings, host["cores"]) for row in ALL_ROWS if row.key in wanted}
    results = [result for result in outcomes.values() if result is not None]
    failed = [key for key, result in outcomes.items() if result is None]
    if options.markdown:
        print_markdown(results)
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    write(options.json or RESULTS / f"local-{stamp}.json", settings, host, results, failed)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
