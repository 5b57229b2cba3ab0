"""The tables of trainings, made of the kept runs: `benchmarks.report` writes them into the documents."""

from collections.abc import Callable, Sequence

from benchmarks.spread import Spread
from benchmarks.training import runs, speed
from benchmarks.training.runs import Run


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows))


def about(run: Run) -> str:
    """The machine, the versions and the day."""
    machine, versions = run.about["machine"], run.about["versions"]
    gpu = f", {machine['gpu']}" if machine["gpu"] else ", no GPU"
    return (
        f"{machine['processor']}, {machine['cores']} cores{gpu}; Python {versions['python']}, torch "
        f"{versions['torch']}, Ray {versions['ray']}; commit {str(run.about['commit'])[:10]}, {run.day}"
    )


def speed_table(run: Run) -> str:
    """Images per second, waiting and efficiency of the best of torch's, and of dpex."""
    has_gpu = run.about["machine"]["gpu"] is not None
    gpu_column = ("GPU stall",) if has_gpu else ()
    header = ("work", "loader", "images/s", "after learning", "waiting", *gpu_column, "efficiency after learning")
    return table(header, [_speed_row(run, key, has_gpu=has_gpu) for key in speed.quoted(run)])


def _speed_row(run: Run, key: str, *, has_gpu: bool) -> tuple[str, ...]:
    found, batch = speed.paces(run, key), run.settings["batches"][key]
    whole = Spread.of([batch * pace.course.rate for pace in found])
    settled, part = Spread.of(speed.rates(run, key)), speed.efficiency(run, key)
    waiting = Spread.of([pace.course.waiting for pace in found])
    stall = (_percent(Spread.of([(one.gpu_stall_s or 0.0) / one.course.seconds for one in found])),) if has_gpu else ()
    work, loader = key.split(" ", 1)
    rates = (f"{one.median:,.0f} ({one.low:,.0f} to {one.high:,.0f})" for one in (whole, settled))
    return (WORKS[work], _loader(loader), *rates, _percent(waiting), *stall, _percent(part))


WORKS = {
    "photographs": "JPEG decode, random resized crop, colour jitter, normalise",
    "waits": f"a wait of 4 ms per image, {speed.MACHINE_CPUS} workers per machine",
}


def _loader(name: str) -> str:
    engine, _, rest = name.partition(":")
    if engine == "torch":
        return f"torch, best: {rest} workers"
    nodes = rest.removeprefix("auto").strip().removeprefix("+").split(" ")[0]
    further = f" and {nodes} further node{'s' if nodes != '1' else ''}" if nodes else ""
    return f'dpex, `"auto"`, this machine{further}'


def _percent(spread: Spread) -> str:
    return f"{spread.median:.0%} ({spread.low:.0%} to {spread.high:.0%})"


def speed_text(run: Run) -> str:
    """What the run was measured on and with."""
    limits = {key.split()[0]: key for key in run.rows if key.endswith(" limit")}
    told = "; ".join(f"{Spread.of(speed.rates(run, key)).median:,.0f}/s, {WORKS[work]}" for work, key in limits.items())
    return (
        f"{run.settings['rounds']} rounds of {run.settings['seconds']:g} s, twice as long with further nodes, from "
        f"`iter()` on: median (range). The limit, with one batch again and again: {told}. {about(run)}."
    )


BLOCKS: dict[str, Callable[[Run], str]] = {"training-speed": speed_table, "training-speed-origin": speed_text}


def block(name: str) -> str:
    """Return the text of a block. Raises ValueError if no run is kept."""
    return BLOCKS[name](runs.quoted(name, speed.SUBJECT))
