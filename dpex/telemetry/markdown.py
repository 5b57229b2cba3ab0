"""``docs/metrics.md`` from the catalogue: ``python -m dpex.telemetry.markdown > docs/metrics.md``."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from dpex.telemetry.catalogue import METRICS, Group, Label, Metric

_TITLES: dict[Group, str] = {
    "consumer": "The training loop",
    "workers": "Workers",
    "queue": "Queues and bytes",
    "tuner": "The tuner",
    "gpu": "GPU",
    "process": "The process",
}
_PREFACE = """\
# Metrics

Made from `dpex/telemetry/catalogue.py` by `python -m dpex.telemetry.markdown > docs/metrics.md`.
"""


def as_markdown(metrics: Iterable[Metric] = METRICS) -> str:
    """The documentation of these metrics."""
    metrics = tuple(metrics)
    parts = [_PREFACE]
    for group, title in _TITLES.items():
        parts.append(f"\n## {title}\n")
        parts += [_described(metric) for metric in metrics if metric.group == group]
    return "".join(parts)


def _described(metric: Metric) -> str:
    kind = " ".join(part for part in (metric.kind, metric.unit and f"in {metric.unit.replace('_', ' ')}") if part)
    lines = [f"\n### `{metric.name}`\n", f"*{kind}.* {metric.help} **Read it:** {metric.how_to_read}\n"]
    if metric.labels:
        lines += [_labelled(label) for label in metric.labels]
    if metric.buckets:
        lines += [f"\nBuckets: {', '.join(f'{bound:g}' for bound in metric.buckets)}, +Inf."]
    return "\n".join(lines).rstrip() + "\n"


def _labelled(label: Label) -> str:
    values = " | ".join(f"`{value}`" for value in label.values)
    about = ": ".join(part for part in (values, label.help) if part)
    return f"- `{label.name}`" + (f" = {about}" if values else f": {about}" if about else "")


if __name__ == "__main__":
    sys.stdout.write(as_markdown())
