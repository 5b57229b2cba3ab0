"""What the panels' queries are made of: every selector is bound to the variables, every rate to Grafana's interval.

Ratios are sums over sums.
"""

from __future__ import annotations

from dpex.telemetry.catalog import BY_NAME

PROCESS = 'job=~"$job",instance=~"$instance",run_id=~"$run",rank=~"$rank"'
LOADER = f'{PROCESS},loader=~"$loader"'
STEPS = ((None, "green"), (0.05, "yellow"), (0.2, "red"))
"""Under 5 % loading is not the bottleneck, over 20 % it is."""
RANK = "rank {{rank}} of {{run_id}}"
BY_RANK = "sum by (run_id, rank)"
MACHINE = "{{machine}} to rank {{rank}} of {{run_id}}"
BY_MACHINE = "sum by (run_id, rank, machine)"


def of(name: str, also: str = "", *, per: str = LOADER) -> str:
    """The series of a metric that are chosen."""
    return f"{name}{{{per}{',' if also else ''}{also}}}"


def rate(name: str, also: str = "", *, per: str = LOADER) -> str:
    """Per second."""
    return f"rate({of(name, also, per=per)}[$__rate_interval])"


def increase(name: str, *, window: str = "$__rate_interval") -> str:
    """How many came."""
    return f"increase({of(name)}[{window}])"


def quantile(q: float, name: str, by: str = "le") -> str:
    """Of a histogram."""
    return f"histogram_quantile({q:g}, sum by ({by}) ({rate(name + '_bucket')}))"


def about(*names: str) -> str:
    """What the catalogue says of these metrics: a sentence, or a list (Grafana reads Markdown)."""
    texts = [f"{BY_NAME[name].help} {BY_NAME[name].how_to_read}" for name in names]
    if len(names) == 1:
        return texts[0]
    return "".join(f"\n- `{name}`: {text}" for name, text in zip(names, texts, strict=True))


SPENT = rate("dpex_consumer_seconds_total")
WAITED = rate("dpex_consumer_seconds_total", 'state="wait"')
GPU_STALLED = rate("dpex_gpu_stall_seconds_total")
TRAINING_WAIT = f"{BY_RANK} ({WAITED}) / {BY_RANK} ({SPENT})"
GPU_STALL = f"{BY_RANK} ({GPU_STALLED}) / {BY_RANK} ({SPENT})"
STARVED = f"({GPU_STALL}) or ({TRAINING_WAIT})"
STARVED_PART = f"({STARVED}) / on (run_id) group_left () sum by (run_id) ({STARVED})"
"""Of what the ranks of a run lose together, the part of each."""
