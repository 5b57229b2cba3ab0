"""Writes ``docs/metrics.md`` from the catalogue: ``python -m dpex.telemetry.markdown > docs/metrics.md``."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from dpex.telemetry.catalog import METRICS
from dpex.telemetry.labels import Label
from dpex.telemetry.metric import Group, Metric

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

The lists below are made from `dpex/telemetry/catalog.py`: `python -m dpex.telemetry.markdown > docs/metrics.md`.

## How they are served

`DpexDataLoader(..., metrics_port=0)`, or `DPEX_METRICS_PORT=0` for a script that is not to be changed, serves metrics
from the training process at a free port. Any other number is that port or, where another process has it, a free one,
with a warning. All loaders of a process share one endpoint, which is up from the first `iter()` until the last of them
is closed or dies.

Metrics are rendered at most four times a second for each format, however many clients ask, and less often where
rendering those of many loaders would take over 0.5 % of a core; nobody gets any that are 2 s old. A hundred scrapes a
second cost a training loop 0.3 % of its batches with one loader, and 0.6 % with eight (`python -m benchmarks.overhead`,
2 cores).

Loaders whose batches PyTorch's own iterators make (`local_engine="torch"`, DataPipes, other systems than Linux) have no
metrics. Work under way is counted when it ends, at the latest; a long wait is counted while it lasts.

## Who can read them

Only this machine can reach the endpoint unless `metrics=MetricsConfig(host=...)` says otherwise.
With `MetricsConfig(tls=TLSConfig(certfile=..., keyfile=...))` it is served over TLS, and with `client_cafile=...` only
to clients whose certificate that authority has signed. There are no passwords: prometheus-client has none, and its
maintainers declined them (client_python, pull request 610).

So that no web page can read metrics through somebody's browser (DNS rebinding), a request without TLS must name this
machine in its `Host` header: by an IP address, as `localhost`, by the machine's own name, or by the value of `host=`.
Where other machines may connect, a name without a dot or one that ends in `.local`, `.internal` or `.home.arpa` is
enough. Any other name is answered with status 421 unless `MetricsConfig(allowed_hosts=[...])` or
`DPEX_METRICS_ALLOWED_HOSTS` lists it (with commas between; `.example.org` is that domain, `*` is any name). A slow or
silent client does not hold up others: a request must arrive within 10 s, its answer must be read within 30 s, and when
64 connections are open, an idle one is closed for a new one.

## How Prometheus finds them

Each process announces itself by a file in `MetricsConfig(directory=...)`, else `$DPEX_METRICS_DIR`, else
`$XDG_RUNTIME_DIR/dpex`, else `dpex-<uid>` in the directory for temporary files, else `~/.cache/dpex/metrics`. Files of
processes that were killed are removed when the next one starts.

```yaml
scrape_configs:
  - job_name: dpex
    file_sd_configs:
      - files: ["/run/user/1000/dpex/dpex-*.json"]
```

The last three directories are made for their user alone, so a Prometheus that runs as another user needs one of the
first two. A directory of these that is a symbolic link, another user's, or open to others is passed over, with a
warning. A directory that is given must be the user's own or root's, must not be reached by another user's link, and
must not be writable for everybody; otherwise there is a warning and no announcement.

The labels of the target are `run_id` (`$DPEX_RUN_ID`, else torchrun's or Slurm's, else one of this process), `rank` and
`node`; the metrics themselves have only those named below. Of several ranks on a machine one gets a fixed port; all are
found by their announcements.

`dashboards/` in the repository has this for Prometheus, rules and alerts, a Grafana dashboard, and a `docker compose`
file for both. On a Ray cluster the headline series are in Ray's own metrics as well, as `ray_dpex_…`: the training
loop's seconds, causes, batches, samples, and workers. Ray exports metrics only where `ray[default]` is installed.

## What else is at that address

- `/` is the live page, which needs neither Grafana nor the internet: the diagnosis with what would change it, waiting
  over time, workers, queue, stages, and the tuner's decisions with their reasons.
- `/diagnosis` is the diagnosis in full, as a page.
- `/diagnosis.json` is what `DpexDataLoader.diagnose` finds: `?loader=NAME` for one loader, else all; `?stretch=recent`
  for the latest half minute, or as much as it takes to conclude anything, else the whole run.
- `/api/state` is what the page shows: one frame a second for the last ten minutes; `?since=N` for those after frame N.

`dpex top` shows the same in a terminal, for all processes that are announced, or for those whose addresses it is given.
In both kinds of JSON, `version` grows when a field changes its meaning. A diagnosis is made only when it is asked for,
and so seldom that all of them take 1 % of a core at most; a scrape makes none.
"""


def as_markdown(metrics: Iterable[Metric] = METRICS) -> str:
    """Return the documentation of these metrics."""
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
