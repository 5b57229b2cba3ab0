"""What ``dpex bench`` tells: for people, and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from dpex.autotune.forecast import Need, Rate, Work, fastest, rates
from dpex.cli.bench.measure import Measured, Subject
from dpex.profile.spans import Spans, percentile

Row = tuple[str, ...]
_CROWDED = 0.1
"""CPUs that others keep busy, from which on it is said."""


def as_json(found: Subject, measured: Measured, work: Work, needs: list[Need]) -> str:
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


def as_text(found: Subject, measured: Measured, work: Work, needs: list[Need]) -> str:
    paragraphs = (
        _heading(found, measured),
        _steps(measured),
        _slowest(measured.spans),
        _batch(measured, work),
        _rates(work, rates(work), found.batch_size or 1),
        _needs(work, needs),
    )
    return "\n\n".join("\n".join(lines) for lines in paragraphs)


def _heading(found: Subject, measured: Measured) -> list[str]:
    sample = _sample(measured.spans)
    batches = f"batches of {found.batch_size}" if found.batch_size else "batches made by the dataset"
    mean, cpu, *most = (_time(sample[name]) for name in ("wall_s", "cpu_s", "p50_s", "p95_s", "p99_s"))
    took = f"{measured.batches:,} batches ({measured.spans.samples:,} samples) in {measured.seconds:.1f} s"
    lines = [
        f"{found.name}: {type(found.dataset).__name__}, {batches}",
        f"{took} in one thread; before them the first one took {_time(measured.first_s)}",
    ]
    if measured.others >= _CROWDED:
        lines.append(f"other programs kept {measured.others:.1f} of {measured.cpus:g} CPUs busy meanwhile")
    sample_line = f"a sample: {mean} on average, of which {cpu} CPU; half of them up to {most[0]}"
    return [*lines, "", f"{sample_line}, 95% up to {most[1]}, 99% up to {most[2]}"]


def _steps(measured: Measured) -> list[str]:
    """Per sample: calls, wall and CPU; the share is of all the time, encoding included."""
    spans, samples = measured.spans, max(1, measured.spans.samples)
    per_batch = measured.fetch_s + measured.collate_s + measured.encode_s
    total_s = max(1e-12, per_batch * measured.batches)
    rows: list[Row] = [("step", "calls", "wall/sample", "CPU/sample", "of the time")]
    for step in spans.steps:
        name = "  " * (len(step.path) - 1) + step.path[-1]
        times = _time(step.wall_s / samples), _time(step.cpu_s / samples)
        rows.append((name, f"{step.calls:,}", *times, f"{step.wall_s / total_s:.0%}"))
    wall_s, cpu_s = (seconds * measured.batches for seconds in (measured.encode_s, measured.encode_cpu_s))
    times = _time(wall_s / samples), _time(cpu_s / samples)
    rows.append(("encode", f"{measured.batches:,}", *times, f"{wall_s / total_s:.0%}"))
    return _table(rows)


def _slowest(spans: Spans) -> list[str]:
    shown = ", ".join(f"{_plain(slow.index)} ({_time(slow.wall_s)})" for slow in spans.slowest[:5])
    return [f"slowest samples, by index: {shown}"]


def _batch(measured: Measured, work: Work) -> list[str]:
    line = f"a batch: {_time(work.cpu_s)} CPU and {_time(work.wait_s)} waiting, {measured.batch_bytes / 1e6:,.2f} MB"
    if measured.queued_s > 0.02 * work.cpu_s:
        line += f"; {_time(measured.queued_s)} more went by queueing for a CPU"
    return [line]


def _rates(work: Work, rows: tuple[Rate, ...], batch_size: int) -> list[str]:
    settings, rate = fastest(work)
    table: list[Row] = [("workers", "batches/s", "samples/s")]
    table += [(f"{row.workers or 'none'}", _rate(row.rate), _rate(row.rate * batch_size)) for row in rows]
    return [
        f"predicted for this machine ({work.cpus:g} CPUs, nothing else running), if the training step takes no time:",
        *_table(table),
        f"best: {settings}: {_rate(rate)} batches/s",
    ]


def _needs(work: Work, rows: list[Need]) -> list[str]:
    table: list[Row] = [("step", "best here", "stall", "enough", "with other machines", "stall")]
    for row in rows:
        here = _time(row.step_s), str(row.here), f"{row.stall:.0%}"
        if row.suffices:
            table.append((*here, "yes", "", ""))
        else:
            cpus = max(1, round(row.remote_cpus))
            there = f"{row.anywhere} ({cpus} remote CPU{'s' * (cpus != 1)})" if row.anywhere.remote else "no better"
            table.append((*here, "no", there, f"{row.anywhere_stall:.0%}" if row.anywhere.remote else ""))
    return [
        "workers for a training step that keeps one CPU busy (the network to other machines is not in this):",
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


def _time(seconds: float) -> str:
    if seconds >= 1.0:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} µs"


def _rate(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"
