"""The tables and plots of docs/scale.md, made of the results of `python -m benchmarks.scale`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.parts import origin
from benchmarks.process import ROOT
from benchmarks.scale import links, nodes

DOCUMENT = ROOT / "docs/scale.md"
PLOTS = ROOT / "docs/scale"
GIGABYTES = {"node_bytes_s": 1.25e9, "trainer_bytes_s": 1.25e9}
MODELS: dict[str, dict[str, Any]] = {
    "1 KB batches": {"nbytes": 1024},
    "10 MB batches, 10 Gbit/s": {"nbytes": 10_000_000, **GIGABYTES},
    "1 KB batches, each node dies 10 times an hour": {"nbytes": 1024, "deaths_per_hour": 10.0},
}
"""The simulated cases, by what differs from the measured one."""
Results = dict[str, Any]


def split(found: Results) -> dict[tuple[Any, ...], Results]:
    """Return the results of a part by the values that their keys list, numbers as numbers; seconds are left out."""
    return {tuple(map(_value, key.split(", ")))[:-1]: one for key, one in found.items()}


def _value(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        return text


def fixed_nodes(found: Results) -> dict[int, Results]:
    """Return the results of a fixed number of workers by the number of nodes."""
    return {int(key[1]): one for key, one in split(found).items() if key[0] == "dpex"}


def shown(value: float | None, unit: str = "", digits: int = 3) -> str:
    """Return a figure with so many digits, or "-"."""
    return "-" if value is None else f"{float(f'{value:.{digits}g}'):,g}{unit}"


def table(heads: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> str:
    """Return a table in Markdown."""
    lines = [heads, tuple("---" for _ in heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def workers_table(found: Results) -> str:
    heads = (
        "workers",
        "loader",
        "training thread, µs a batch",
        "first batch, s",
        "all up, s",
        "memory, GB",
        "batches/s",
    )
    rows = (
        (
            f"{number:g}" if who != "auto" else f"{one['running']} of auto",
            who,
            shown(one["thread_us"]),
            shown(one["first_s"]),
            shown(one["all_s"]),
            shown(one["memory_gb"]),
            shown(one["rate"]),
        )
        for (who, number), one in sorted(split(found).items(), key=lambda pair: (pair[0][1], pair[0][0]))
    )
    return table(heads, rows)


def _by_nodes(found: Results) -> dict[tuple[str, int], Results]:
    pairs = {(", ".join(map(str, key[:-1])), int(key[-1])): one for key, one in split(found).items()}
    return dict(sorted(pairs.items(), key=lambda pair: (pair[0][1], nodes.WHO.index(pair[0][0]))))


def nodes_table(found: Results) -> str:
    heads = (
        "nodes",
        "loader",
        "batches/s",
        "of the ideal",
        "first batch, s",
        "90 % of its rate, s",
        "thread, µs a batch",
    )
    rows = (
        (
            str(count),
            who,
            shown(one["rate"]),
            f"{one['rate'] / nodes.ideal(count):.0%}",
            shown(one["first_s"]),
            shown(one["full_s"]),
            shown(one["thread_us"]),
        )
        for (who, count), one in _by_nodes(found).items()
    )
    return table(heads, rows)


def links_table(found: Results) -> str:
    heads = (
        "link",
        "round trip",
        *(f"{size / 1e6:g} MB, {who}" for size in links.BATCH_BYTES for who in ("fixed", "auto")),
    )
    results = split(found)

    def cell(*key: Any) -> str:
        one = results.get(key)
        return "-" if one is None or "share" not in one else f"{one['share']:.0%}"

    rows = (
        (
            f"{rate / 1e9:g} Gbit/s",
            f"{1000 * trip:g} ms",
            *(cell(who, rate, trip, float(size)) for size in links.BATCH_BYTES for who in ("fixed", "auto")),
        )
        for rate in links.RATES
        for trip in links.ROUND_TRIPS_S
    )
    return table(heads, rows)


def starts_table(found: Results) -> str:
    """Seconds, and their ratio to the bare actor of the same run."""
    runs = {f"{key[0]:g} node{'s' * (key[0] > 1)}": one for key, one in sorted(split(found).items())}
    names = dict.fromkeys(name for one in runs.values() for name in one)

    def cell(one: Results, name: str) -> str:
        return f"{one[name]:.2f} s, {one[name] / one['bare actor']:.2f}" if name in one else "-"

    return table(("", *runs), ((name, *(cell(one, name) for one in runs.values())) for name in names))


def ranks_table(found: Results) -> str:
    """Ranks of a job; "top" and "diagnose" are seconds until `dpex top --once` and `diagnose(group=)` had answered."""
    heads = (
        "ranks",
        "loader",
        "batches/s, all",
        "training thread, µs a batch",
        "first batch, s",
        "top, s",
        "diagnose, s",
    )
    rows = (
        (
            f"{count:g}",
            who,
            shown(one["rate"]),
            shown(one["thread_us"]),
            shown(one["first_s"]),
            shown(one.get("top_s")),
            shown(one.get("diagnose_s")),
        )
        for (who, count), one in sorted(split(found).items(), key=lambda pair: pair[0][1])
    )
    return table(heads, rows)


def shares_table(found: Results) -> str:
    heads = ("what happens", "workers of each training", "seconds until then")
    (course,) = found.values()
    rows = (
        (what, ", ".join(map("{:g}".format, one["workers"])), shown(one["seconds"])) for what, one in course.items()
    )
    return table(heads, rows)


def faults_table(found: Results) -> str:
    heads = ("what ends", "samples lost", "samples twice", "full rate again after, s")
    titles = {"node": "1 of {:g} nodes", "control service": "Ray's control service, with {:g} nodes"}
    rows = (
        (titles[key[0]].format(key[1]), str(one["lost"]), str(one["twice"]), shown(one["full_again_s"]))
        for key, one in split(found).items()
    )
    return table(heads, rows)


def large_table(found: Results) -> str:
    lines = {
        "shuffle": ("100 million indices, shuffled", lambda one: f"{one['first_s']:.1f} s, {one['peak_gb']:.1f} GB"),
        "alive": (
            "100 open loaders",
            lambda one: f"{one['processes']} processes, {one['memory_gb']:.1f} GB, {one['first_s']:.2f} s each",
        ),
        "carry": (
            "batches of 10 MB from another node",
            lambda one: f"{one['gigabytes_s']:.1f} GB/s, {one['cpu_s']:.2f} s of the trainer's CPUs a GB",
        ),
        "send": ("a dataset of 1 GB on 4 nodes", lambda one: f"{one['first_s']:.1f} s, all {one['all_s']:.1f} s"),
    }
    keyed = {tuple(key.split(", ")): one for key, one in found.items()}
    whos = ("torch", "dpex", "auto", "Ray tasks")
    rows = (
        (title, *(tell(keyed[part, who]) if (part, who) in keyed else "-" for who in whos))
        for part, (title, tell) in lines.items()
    )
    return table(("", *whos), rows)


def model_table(found: Results) -> str:
    heads = ("nodes", "ideal, batches/s", *(f"{name}: rate, thread, link" for name in MODELS))
    counts = sorted({int(key.rpartition(", ")[2]) for key in found})

    def cell(name: str, count: int) -> str:
        one = found[f"{name}, {count}"]
        return f"{shown(one['rate'])}/s, {one['thread_share']:.0%}, {min(1.0, one['link_share']):.0%}"

    rows = ((str(n), shown(nodes.ideal(n), digits=5), *(cell(name, n) for name in MODELS)) for n in counts)
    return table(heads, rows)


def check_table(found: Results) -> str:
    """Simulated beside measured rates, of a fixed number of workers."""
    measured, simulated = fixed_nodes(found.get("nodes", {})), found.get("model", {})
    name = next(iter(MODELS))
    rows = (
        (str(n), shown(one["rate"]), shown(sim["rate"]), f"{sim['rate'] / one['rate'] - 1:+.0%}")
        for n, one in sorted(measured.items())
        if (sim := simulated.get(f"{name}, {n}")) is not None
    )
    return table(("nodes", "measured, batches/s", "simulated", "difference"), rows)


TABLES: dict[str, Callable[[Results], str]] = {
    "workers": workers_table,
    "nodes": nodes_table,
    "links": links_table,
    "starts": starts_table,
    "ranks": ranks_table,
    "shares": shares_table,
    "faults": faults_table,
    "large": large_table,
    "model": model_table,
}


def tables(found: Results) -> dict[str, str]:
    """Return the blocks of the page by name."""
    blocks = {f"scale:{part}": make(found[part]) for part, make in TABLES.items() if found.get(part)}
    if found.get("model") and found.get("nodes"):
        blocks["scale:check"] = check_table(found)
    return blocks | {"scale:origin": origin(found)}


def plots(found: Results) -> Iterator[str]:
    """Draw the plots, and yield their names. Raises ImportError without matplotlib (``pip install matplotlib``)."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "dpex"
    PLOTS.mkdir(exist_ok=True)
    curves: dict[str, dict[str, list[tuple[float, float]]]] = {"workers": {}, "nodes": {}, "model": {}}
    for (who, number), one in sorted(split(found.get("workers", {})).items(), key=lambda pair: pair[0][1]):
        if who != "auto":
            curves["workers"].setdefault(who, []).append((number, one["thread_us"]))
    for (who, count), one in _by_nodes(found.get("nodes", {})).items():
        curves["nodes"].setdefault(who, []).append((count, one["rate"]))
    for key, one in found.get("model", {}).items():
        name, _, count = key.rpartition(", ")
        curves["model"].setdefault(name, []).append((int(count), one["rate"]))
    for name in ("nodes", "model"):
        at = sorted({x for points in curves[name].values() for x, _ in points})
        curves[name]["ideal"] = [(x, nodes.ideal(int(x))) for x in at]
    titles = {
        "workers": ("local workers", "CPU of the training thread, µs a batch"),
        "nodes": ("nodes of four workers", "batches/s"),
        "model": ("nodes of four workers, simulated", "batches/s"),
    }
    for name, (x, y) in titles.items():
        yield _plot(name, x, y, curves[name])


def _plot(name: str, x: str, y: str, curves: dict[str, list[tuple[float, float]]]) -> str:
    from matplotlib import pyplot, ticker

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for label, points in curves.items():
        style = {"linestyle": "--", "color": "grey"} if label == "ideal" else {"marker": "o"}
        axes.plot(*zip(*points, strict=True), label=label, **style)  # type: ignore[arg-type]
    values = [value for points in curves.values() for _, value in points]
    axes.set(xlabel=x, ylabel=y, xscale="log")
    if max(values) > 10 * min(values):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
    else:
        axes.set_ylim(0)
    ticks = sorted({at for points in curves.values() for at, _ in points})
    axes.set_xticks(ticks, [f"{at:g}" for at in ticks])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(PLOTS / f"{name}.svg", metadata={"Date": None})
    pyplot.close(figure)
    return f"{name}.svg"
