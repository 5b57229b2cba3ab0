"""Writes what pages repeat of the code: the metrics of ``docs/metrics.md``, and the verdicts of a diagnosis in
``docs/how-to/gpu-starves.md``. Run ``python -m dashboards.pages``."""

from __future__ import annotations

from pathlib import Path

from dpex.diagnose.causes import CAUSES
from dpex.telemetry.catalog import METRICS, Group, Label, Metric

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "metrics.md"
VERDICTS = DOCS / "how-to" / "gpu-starves.md"
MARK = "<!-- The rest is written by `python -m dashboards.pages`. -->\n"
_TITLES: dict[Group, str] = {
    "consumer": "The training loop and its queue",
    "workers": "Workers",
    "network": "The network",
    "tuner": "The tuner",
    "gpu": "GPU",
    "process": "The process",
}


def with_lists(page: str) -> str:
    """Return the page with the present lists after its `MARK`."""
    parts = [page.partition(MARK)[0], MARK]
    for group, title in _TITLES.items():
        parts.append(f"\n## {title}\n")
        parts += [_described(metric) for metric in METRICS if metric.group == group]
    return "".join(parts)


def _described(metric: Metric) -> str:
    kind = " ".join(part for part in (metric.kind, metric.unit and f"in {metric.unit.replace('_', ' ')}") if part)
    lines = [f"\n### `{metric.name}`\n", f"*{kind}.* {metric.help} **Read it:** {metric.how_to_read}\n"]
    lines += [_labelled(label) for label in metric.labels]
    if metric.buckets:
        lines += [f"\nBuckets: {', '.join(f'{bound:g}' for bound in metric.buckets)}, +Inf."]
    return "\n".join(lines).rstrip() + "\n"


def _labelled(label: Label) -> str:
    values = " | ".join(f"`{value}`" for value in label.values)
    about = ": ".join(part for part in (values, label.help) if part)
    return f"- `{label.name}`" + (f" = {about}" if values else f": {about}" if about else "")


_BEGIN, _END = "<!-- `python -m dashboards.pages` writes this table. -->\n", "<!-- End of the table. -->\n"


def with_verdicts(page: str) -> str:
    """Return the page with the present table of verdicts between its marks."""
    before, _, rest = page.partition(_BEGIN)
    rows = [f"| {one.title} | {one.explanation} | {one.advice} |" for one in CAUSES.values()]
    table = "\n".join(["| verdict | what it means | what usually helps |", "|---|---|---|", *rows])
    return f"{before}{_BEGIN}\n{table}\n\n{_END}{rest.partition(_END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(with_lists(PAGE.read_text()))
    VERDICTS.write_text(with_verdicts(VERDICTS.read_text()))
