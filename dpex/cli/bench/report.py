"""What ``dpex bench`` tells: for people, and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from dpex.cli.bench.forecast import MeasuredWork, Rate, WorkersNeeded, fastest, rates
from dpex.cli.bench.measure import BenchSubject, DatasetTimes
from dpex.measure.readable import duration, rounded, size
from dpex.profile.spans import Spans, percentile

Row = tuple[str, ...]
_CROWDED = 0.1
"""CPUs that others keep busy, from which on it is said."""


def as_json(found: BenchSubject, measured: DatasetTimes, work: MeasuredWork, needs: list[WorkersNeeded]) -> str:
    settings, rate = fastest(work)
    told = asdict(measured)
    told.pop("walls_s")
    told["spans"].pop("sample_walls_s")
    told["spans"]["slowest"] = [slow | {"index": _plain(slow["index"])} for slow in told["spans"]["slowest"]]
    return json.dumps(
        {
            "target": found.name,
            "dataset": type(found.dataset).__name__,
            "batch_size": found.batch_size,
            "measured": told,
            "sample": _sample(measured.spans),
            "work": asdict(work) | {"spread": None},
            "rates": [asdict(row) for row in rates(work)],
            "best": {"settings": asdict(settings), "rate": rate},
            "needs": [asdict(row) for row in needs],
        },
        indent=1,
    )


def _plain(index: Any) -> Any:
    return index if isinstance(index, (int, str, type(None))) else repr(index)


def _sample(spans: Spans) -> dict[str, float]:
    """Of one sample, in seconds: means and percentiles of wall time."""
    outer = [step for step in spans.steps if len(step.path) == 1 and step.path[0] != "collate"]
    walls_s = spans.sample_walls_s
    return {
        "wall_s": sum(step.wall_s for step in outer) / max(1, spans.samples),
        "cpu_s": sum(step.cpu_s for step in outer) / max(1, spans.samples),
        **{f"p{percent}_s": percentile(walls_s, percent / 100) for percent in (50, 95, 99)},
    }


def as_text(found: BenchSubject, measured: DatasetTimes, work: MeasuredWork, needs: list[WorkersNeeded]) -> str:
    paragraphs = (
        _heading(found, measured),
        _steps(measured),
        _slowest(measured.spans),
        _batch(measured, work),
        _rates(work, rates(work), found.batch_size or 1),
        _needs(work, needs),
    )
    return "\n\n".join("\n".join(lines) for lines in paragraphs)


def _heading(found: BenchSubject, measured: DatasetTimes) -> list[str]:
    sample = _sample(measured.spans)
    batches = f"batches of {found.batch_size}" if found.batch_size else "batches made by the dataset"
    mean, cpu, *most = (duration(sample[name]) for name in ("wall_s", "cpu_s", "p50_s", "p95_s", "p99_s"))
    made = f"{measured.batches:,} batches were measured, and the steps of {measured.timed_batches:,} others timed"
    took = f"{made}, in {measured.seconds:.1f} s, in one thread"
    lines = [
        f"{found.name}: {type(found.dataset).__name__}, {batches}",
        f"{took}, after a first batch of {duration(measured.first_s)}",
    ]
    if measured.others >= _CROWDED:
        lines.append(f"other programs kept {measured.others:.1f} of the {measured.cpus:g} CPUs busy meanwhile")
    sample_line = f"a sample takes {mean} on average, {cpu} of it CPU time; median {most[0]}"
    return [*lines, "", f"{sample_line}, 95th percentile {most[1]}, 99th {most[2]}"]


def _steps(measured: DatasetTimes) -> list[str]:
    """Per sample: calls, wall and CPU; the share is of all the time, encoding included."""
    spans, samples, batches = measured.spans, max(1, measured.spans.samples), measured.timed_batches
    per_batch = measured.load_s + measured.collate_s + measured.encode_s
    total_s = max(1e-12, per_batch * batches)
    rows: list[Row] = [("step", "calls", "time/sample", "CPU/sample", "of the time")]
    for step in spans.steps:
        name = "  " * (len(step.path) - 1) + step.path[-1]
        times = duration(step.wall_s / samples), duration(step.cpu_s / samples)
        rows.append((name, f"{step.calls:,}", *times, f"{step.wall_s / total_s:.0%}"))
    wall_s, cpu_s = (seconds * batches for seconds in (measured.encode_s, measured.encode_cpu_s))
    times = duration(wall_s / samples), duration(cpu_s / samples)
    rows.append(("encode", f"{batches:,}", *times, f"{wall_s / total_s:.0%}"))
    return _table(rows)


def _slowest(spans: Spans) -> list[str]:
    shown = ", ".join(f"{_plain(slow.index)} ({duration(slow.wall_s)})" for slow in spans.slowest[:5])
    return [f"slowest samples, by index: {shown}"]


def _batch(measured: DatasetTimes, work: MeasuredWork) -> list[str]:
    times = f"{duration(work.cpu_s)} of CPU time and {duration(work.wait_s)} of waiting"
    line = f"a batch takes {times}, and has {size(measured.batch_bytes)}"
    if measured.queued_s > 0.02 * work.cpu_s:
        line += f"; it queued another {duration(measured.queued_s)} for a CPU"
    return [line]


def _rates(work: MeasuredWork, rows: tuple[Rate, ...], batch_size: int) -> list[str]:
    settings, rate = fastest(work)
    table: list[Row] = [("workers", "batches/s", "samples/s")]
    table += [(f"{row.workers or 'none'}", rounded(row.rate), rounded(row.rate * batch_size)) for row in rows]
    return [
        f"predicted for this machine ({work.cpus:g} CPUs, nothing else running) with a training step of no time:",
        *_table(table),
        f"best: {settings}: {rounded(rate)} batches/s",
    ]


def _needs(work: MeasuredWork, rows: list[WorkersNeeded]) -> list[str]:
    table: list[Row] = [("step", "best here", "wait", "enough", "with other machines", "wait")]
    for row in rows:
        here = duration(row.step_s), str(row.here), f"{row.wait:.0%}"
        if row.suffices:
            table.append((*here, "yes", "", ""))
        else:
            cpus = max(1, round(row.remote_cpus))
            there = f"{row.anywhere} ({cpus} remote CPU{'s' * (cpus != 1)})" if row.anywhere.remote else "no better"
            table.append((*here, "no", there, f"{row.anywhere_wait:.0%}" if row.anywhere.remote else ""))
    return [
        "workers needed by a training step that keeps one CPU busy (the network to other machines is left out):",
        *_table(table, left=(0, 1, 4)),
    ]


def _table(rows: Sequence[Row], left: tuple[int, ...] = (0,)) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if at in left else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  " + "  ".join(cells).rstrip())
    return lines
