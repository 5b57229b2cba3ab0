"""``docs/metrics.md`` from the catalogue: ``python -m dpex.telemetry.markdown > docs/metrics.md``."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from dpex.telemetry.catalog import METRICS, Group, Label, Metric

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

`DpexDataLoader(..., metrics_port=0)`, or `DPEX_METRICS_PORT=0` for a script that is not to be changed, serves them from
the training process at a free port (any other number: at that one, or, where another process has it, at a free one,
with a warning). All loaders of a process share one endpoint; it is up from the first `iter()` until the last of them is
closed or dies. Only this machine can reach it unless
`metrics_host=` says otherwise. `metrics_certfile=` and `metrics_keyfile=` make it TLS, and with
`metrics_client_cafile=` only clients with a certificate of that authority are served. There are no passwords:
prometheus-client has none, and its maintainers declined them (client_python, pull request 610).

So that no web page can read metrics through somebody's browser (DNS rebinding), requests without TLS must name this
machine: by an address, as `localhost`, by its own name or what `metrics_host=` said, and, where other machines may
come, by names without a dot or that end in `.local`, `.internal` or `.home.arpa`. Others are answered with status 421
unless `DPEX_METRICS_ALLOWED_HOSTS` has them (with commas between; `.example.org`: that domain; `*`: any name). A slow
or silent client holds up nobody: requests have 10 s, answers 30 s, and of 64 connections an idle one makes room.

Each process announces itself by a file in `metrics_dir=`, else `$DPEX_METRICS_DIR`, else `$XDG_RUNTIME_DIR/dpex`, else
`dpex-<uid>` in the directory for temporary files, else `~/.cache/dpex/metrics`. Files of processes that were killed go
when the next one starts. The last three are made for their user alone, so a Prometheus that runs as another user needs
one of the first two; what is a symbolic link there, another user's, or open to others is passed over, with a warning.
One that is given must be the user's own or root's, reached by no other user's link, and not for everybody to change;
else there is a warning and no announcement.

```yaml
scrape_configs:
  - job_name: dpex
    file_sd_configs:
      - files: ["/run/user/1000/dpex/dpex-*.json"]
```

At the same address `/` is a page that shows them live, without Grafana and without the internet: the diagnosis with
what would change it, waiting over time, workers, queue, stages, and the tuner's decisions with their reasons. `dpex
top` shows the same in a terminal, for all processes that are announced, or for those whose addresses it is given.
Both read `/api/state`, JSON with one frame a second for the last ten minutes (`?since=N`: those after frame N), and
`/diagnosis.json`, what `DpexDataLoader.diagnose` finds (`?loader=NAME`, else all; `?stretch=recent`: of the latest
half minute, or as much as it takes to conclude anything; else of the whole run). In both `version` grows when a field
changes its meaning. `/diagnosis` is the same as a page. A diagnosis is made only when it is asked for, and so seldom
that all of them take 1 % of a core at most; a scrape makes none.

Metrics are rendered at most four times a second for each format, however many ask, and less often where rendering
those of many loaders would take over 0.5 % of a core; nobody gets any that are 2 s old. A hundred scrapes a second cost
a training loop 0.3 % of its batches with one loader, and 0.6 % with eight (`python -m benchmarks.overhead`, 2 cores).

`dashboards/` has this for Prometheus, rules and alerts, a Grafana dashboard, and a `docker compose` file for both.

The target's labels are `run_id` (`$DPEX_RUN_ID`, else torchrun's or Slurm's, else one of this process), `rank` and
`node`; the metrics themselves have only those named below. Of several ranks on a machine one gets a fixed port; all are
found by their announcements.

On a Ray cluster the headline series are in Ray's own metrics as well, as `ray_dpex_…`: the training loop's seconds,
causes, batches, samples, and workers. Ray exports metrics only where `ray[default]` is installed.

Loaders whose batches PyTorch's own iterators make (`local_engine="torch"`, DataPipes, other systems than Linux) have no
metrics. What is under way is counted at the latest when it has ended; a long wait by the second.
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
