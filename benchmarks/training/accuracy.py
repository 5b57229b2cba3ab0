"""Is a model as good as before? `python -m benchmarks.training.accuracy` (`make accuracy`).

A small network (two convolution blocks and three linear layers) is trained with Adam, learning rate 0.001, batches of
100 pictures, by torch's `DataLoader` and by dpex's with local workers, with workers on a Ray cluster, and with
`num_workers="auto"`; on one device, with `nn.DataParallel` and with two ranks of `DistributedDataParallel`; with five
seeds each. Without a GPU, DataParallel calls the network as it is, and the ranks meet through gloo.

For each seed all loaders must give the same losses in every step and the same weights in the end, bit for bit, under
`seeding="batch"`: on the CPU this is checked, and the command ends with 1 where it does not hold. torch's loader takes
part, as loading these pictures draws nothing. In further rows each picture is shifted at random as it is loaded; these
compare dpex with itself.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev

from benchmarks.cluster import two_raylets
from benchmarks.process import MeasurementError, run_module
from benchmarks.training import runs
from benchmarks.training.runs import Run
from benchmarks.training.trainer import DEVICES, PLACES, WORKERS, Job, Training

SUBJECT = "accuracy"
EPOCHS, FASHION_EPOCHS = 3, 40
"""The digits are a fortieth of FashionMNIST's pictures, and are learnt within a few epochs."""
SEEDS = 5
LIMIT_S = 3600.0
"""The longest that one row may take."""


@contextmanager
def cluster(is_wanted: bool) -> Iterator[str | None]:
    """The address of a Ray cluster on this machine, whose second raylet has place for the workers of all ranks."""
    if not is_wanted:
        yield None
        return
    with two_raylets(2 * WORKERS) as address:
        yield address


def jobs_of(options: argparse.Namespace) -> list[Job]:
    """A job for each row, in their order."""
    seeds = tuple(range(options.seeds))
    shared = {"epochs": options.epochs, "limit": options.limit, "data": options.data}
    found = [Job(devices=devices, place=place, seeds=seeds, **shared) for devices in DEVICES for place in PLACES]
    shifted = [
        Job(devices="single", place=place, seeds=seeds[:1], is_shifted=True, **shared)
        for place in PLACES
        if place != "torch"
    ]
    return [job for job in (*found, *shifted) if options.only is None or job.key in options.only]


def trainings(run: Run, key: str) -> list[Training]:
    """Those of a row; none if it was not run."""
    return [Training.from_dict(fields) for fields in run.rows.get(key, ())]


def differences(run: Run) -> list[str]:
    """Where two loaders trained differently: rows of the same devices must have the same curves and weights."""
    groups: dict[tuple[str, str], list[str]] = {}
    for key in run.rows:
        devices, _, rest = key.partition(":")
        groups.setdefault((devices, rest.partition(":")[2]), []).append(key)
    found = []
    for first, *others in groups.values():
        for other in others:
            for a, b in zip(trainings(run, first), trainings(run, other), strict=False):
                if (a.curve, a.weights) != (b.curve, b.weights):
                    found.append(f"{first} and {other} differ with seed {a.seed}")
    return found


def problems(run: Run) -> list[str]:
    """What speaks against quoting a run."""
    wanted = [job.key for job in jobs_of(parse([]))]
    found = [f"{key} is missing" for key in wanted if key not in run.rows]
    found += [
        f"{key} has fewer than {SEEDS} seeds"
        for key in run.rows
        if len(run.rows[key]) < SEEDS and not key.endswith(":shifted")
    ]
    found += ["epochs were cut short by --limit"] if run.settings["limit"] is not None else []
    return found + (differences(run) if run.about["machine"]["gpu"] is None else [])


def spread(values: Sequence[float]) -> tuple[float, float]:
    """Mean, and standard deviation of single values, 0 of a single one."""
    return mean(values), stdev(values) if len(values) > 1 else 0.0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.training.accuracy",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--data", metavar="FOLDER", help="with FashionMNIST's IDX files (without it: digits)")
    parser.add_argument("--epochs", type=int, help=f"({EPOCHS}; {FASHION_EPOCHS} with --data)")
    parser.add_argument("--seeds", type=int, default=SEEDS, help=f"trainings of each loader ({SEEDS})")
    parser.add_argument("--limit", type=int, metavar="N", help="end each epoch after N batches")
    parser.add_argument("--only", nargs="+", metavar="ROW", help="such as single:local, ddp:auto, single:auto:shifted")
    parser.add_argument("--results", type=Path, default=runs.RESULTS / "local-accuracy.json", metavar="FILE")
    parser.add_argument("--keep", metavar="NAME", help="keep the run as results/training/accuracy-NAME.json")
    options = parser.parse_args(arguments)
    options.epochs = options.epochs or (FASHION_EPOCHS if options.data else EPOCHS)
    return options


def run_rows(options: argparse.Namespace) -> Run:
    """The run with all rows that were asked for. Raises MeasurementError."""
    settings = {"epochs": options.epochs, "seeds": options.seeds, "limit": options.limit}
    run = runs.begun(SUBJECT, settings, options.results)
    missing = [job for job in jobs_of(options) if job.key not in run.rows]
    with cluster(any(job.place == "remote" for job in missing)) as address:
        for job in missing:
            placed = replace(job, address=address)
            told = run_module("benchmarks.training.trainer", placed.to_json(), LIMIT_S)
            run = runs.with_row(run, job.key, json.loads(told.splitlines()[-1]))
            runs.write(run, options.results)
            print(_line(run, job.key), flush=True)
    return run


def _line(run: Run, key: str) -> str:
    found = trainings(run, key)
    right, off = spread([100 * training.accuracy for training in found])
    loss, loss_off = spread([training.losses[-1] for training in found])
    seconds = sum(training.seconds for training in found)
    return f"{key:<24}{right:6.2f} % (±{off:.2f})  loss {loss:.4f} (±{loss_off:.4f})  {seconds:.0f} s"


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if all rows were run and all loaders trained alike; 1 if not, and where the run cannot be kept."""
    options = parse(arguments)
    try:
        run = run_rows(options)
    except MeasurementError as error:
        print(error, file=sys.stderr)
        return 1
    different = differences(run)
    print(*different, sep="\n", file=sys.stderr)
    if different and run.about["machine"]["gpu"] is None:
        return 1
    return 0 if runs.kept_if_asked(run, options.keep, problems) else 1


if __name__ == "__main__":
    sys.exit(main())
