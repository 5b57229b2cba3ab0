"""The tables of trainings, made of the kept runs: `benchmarks.report` writes them into the documents."""

from collections.abc import Callable, Sequence

from benchmarks.spread import Spread
from benchmarks.training import accuracy, runs, speed
from benchmarks.training.accuracy import spread
from benchmarks.training.runs import Run
from benchmarks.training.trainer import PLACES, RANKS, WORKERS

DEVICES = {"single": "single device", "data-parallel": "DataParallel", "ddp": f"DDP, {RANKS} ranks"}
LOADERS = {
    "torch": f"torch, {WORKERS} workers",
    "local": f"dpex, {WORKERS} workers",
    "remote": f"dpex, {WORKERS} workers on Ray (`distribute_mode=True`)",
    "auto": 'dpex, `num_workers="auto"`',
}
NOT_RUN = "-"


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


# -- accuracy ----------------------------------------------------------------------------------------------------------


def accuracy_table(run: Run) -> str:
    """Accuracy and loss by devices and loader, and in how many seeds the training was the same as torch's."""
    header = ("accuracy %", "loss", "devices", "loader", "losses and weights")
    rows = [
        _accuracy_row(run, devices, place)
        for devices in DEVICES
        for place in PLACES
        if f"{devices}:{place}" in run.rows
    ]
    return table(header, rows)


def _accuracy_row(run: Run, devices: str, place: str) -> tuple[str, ...]:
    found, torchs = accuracy.trainings(run, f"{devices}:{place}"), accuracy.trainings(run, f"{devices}:torch")
    right, right_off = spread([100 * training.accuracy for training in found])
    loss, loss_off = spread([training.losses[-1] for training in found])
    same = sum((a.curve, a.weights) == (b.curve, b.weights) for a, b in zip(found, torchs, strict=False))
    alike = NOT_RUN if place == "torch" or not torchs else f"torch's in {same} of {len(found)} seeds"
    figures = f"{right:.2f} (±{right_off:.2f})", f"{loss:.4f} (±{loss_off:.4f})"
    return (*figures, DEVICES[devices], LOADERS[place], alike)


def accuracy_short(run: Run) -> str:
    """Mean accuracy by devices, a column for each loader: the README's."""
    rows = [
        (name, *(_mean_accuracy(run, f"{devices}:{place}") for place in PLACES)) for devices, name in DEVICES.items()
    ]
    return table(("accuracy %", *(LOADERS[place] for place in PLACES)), rows)


def _mean_accuracy(run: Run, key: str) -> str:
    if key not in run.rows:
        return NOT_RUN
    return f"{spread([100 * training.accuracy for training in accuracy.trainings(run, key)])[0]:.2f}"


def accuracy_text(run: Run) -> str:
    """What the run was measured on and with."""
    (first,) = accuracy.trainings(run, "single:torch")[:1]
    shifted = [key for key in run.rows if key.endswith(":shifted")]
    also = f" With pictures shifted at random, {len(shifted)} ways to load them trained alike." if shifted else ""
    return (
        f"{first.data}, {run.settings['epochs']} epochs of batches of 100, Adam with learning rate 0.001, "
        f"{run.settings['seeds']} seeds: mean (± standard deviation of a training). "
        f'All of dpex with `seeding="batch"`.{also} {about(run)}.'
    )


# -- speed -------------------------------------------------------------------------------------------------------------


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


BLOCKS: dict[str, tuple[str, Callable[[Run], str]]] = {
    "accuracy": (accuracy.SUBJECT, accuracy_table),
    "accuracy-short": (accuracy.SUBJECT, accuracy_short),
    "accuracy-origin": (accuracy.SUBJECT, accuracy_text),
    "training-speed": (speed.SUBJECT, speed_table),
    "training-speed-origin": (speed.SUBJECT, speed_text),
}
"""Each block by its name: of which subject's newest kept run it is made, and how."""


def block(name: str) -> str:
    """The text of a block. Raises ValueError without a kept run to make it of."""
    subject, make = BLOCKS[name]
    return make(runs.quoted(name, subject))
