"""Is training sooner done? `python -m benchmarks.training.speed` (`make speed`).

Training with heavy preprocessing: JPEG decode, random resized crop, colour jitter, normalise; batches of 64, or of 256
with a GPU. torch's loader with several numbers of workers, of which the best is quoted, and dpex's with
`num_workers="auto"`, from a cold start. With a GPU a step trains ResNet-50 in bfloat16, and the pictures are normalised
on the GPU by both. Without one a step is a wait of 50 ms, as long as the thread of a training loop has nothing to do.

*Efficiency* is the rate over that of the same loop with one batch, which is used again and again. *Waiting* is the
share of the time in `iter()` and `next()`. *GPU stall* is the share in which the GPU's stream waited for data, by CUDA
events.

Further nodes of a cluster are raylets on this machine, each with two CPUs that it may give away. They have no CPUs of
their own, so they cannot show CPU-bound work: there each picture is a wait of 4 ms instead, about what preparing one
takes, and each machine may have two workers, as if it had two CPUs. What is shown is that "auto" finds the workers that
are needed on one, two and four further nodes, and what it takes to bring the batches from there, but for the network.
"""

import argparse
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.process import MeasurementError, run_module
from benchmarks.spread import Spread
from benchmarks.training import runs
from benchmarks.training.pace import Pace, Request
from benchmarks.training.runs import Run

SUBJECT = "speed"
BATCH, GPU_BATCH, WAITING_BATCH = 64, 256, 32
STEP_S, WAITING_STEP_S = 0.050, 0.012
"""The second needs 11 workers, of 4 ms a picture: two of this machine and two each of four nodes are nearly enough."""
COUNTS = (0, 1, 2, 4, 8, 16)
NODES = (0, 1, 2, 4)
MACHINE_CPUS = 2
"""Of this machine and of each node, where pictures are waits."""
SECONDS, ROUNDS = 15.0, 3
QUOTED_SECONDS = 15.0
NODES_LONGER = 2.0
"""So many times as long where nodes take part: starting what runs there takes seconds on few cores."""
REST_S = 300.0
"""What a measurement may take beside its window: files are made, and clusters started."""


def requests(options: argparse.Namespace, *, has_gpu: bool, has_ray: bool) -> list[Request]:
    """All contestants, in their order."""
    found = _photographs(options, has_gpu=has_gpu) + (_waits(options) if has_ray and not has_gpu else [])
    return [one for one in found if options.only is None or one.key in options.only]


def _photographs(options: argparse.Namespace, *, has_gpu: bool) -> list[Request]:
    cores = len(os.sched_getaffinity(0))
    counts = sorted({cores, *(count for count in COUNTS if count <= max(4, 2 * cores))})

    def one(engine: str, workers: int | str = 0) -> Request:
        batch = GPU_BATCH if has_gpu else BATCH
        return Request(
            work="photographs", engine=engine, batch=batch, seconds=options.seconds, step_s=STEP_S, workers=workers
        )

    return [one("limit"), *(one("torch", count) for count in counts), one("dpex", "auto")]


def _waits(options: argparse.Namespace) -> list[Request]:
    def one(engine: str, workers: int | str = 0, nodes: int = 0) -> Request:
        return Request(
            work="waits",
            engine=engine,
            batch=WAITING_BATCH,
            seconds=options.seconds * (NODES_LONGER if nodes else 1.0),
            step_s=WAITING_STEP_S,
            workers=workers,
            nodes=nodes,
            node_cpus=MACHINE_CPUS,
            most_local=MACHINE_CPUS,
        )

    torchs = [one("torch", count) for count in range(MACHINE_CPUS + 1)]
    return [one("limit"), *torchs, *(one("dpex", "auto", nodes) for nodes in NODES)]


# -- what it comes to --------------------------------------------------------------------------------------------------


def paces(run: Run, key: str) -> list[Pace]:
    """Those of a contestant, by round."""
    return [Pace.from_dict(fields) for fields in run.rows[key]]


def rates(run: Run, key: str) -> list[float]:
    """Images per second after learning, by round."""
    return [run.settings["batches"][key] * pace.course.settled_rate for pace in paces(run, key)]


def efficiency(run: Run, key: str) -> Spread:
    """The rate over that of the limit, within a round."""
    limits = rates(run, f"{key.split()[0]} limit")
    return Spread.of([rate / limit for rate, limit in zip(rates(run, key), limits, strict=False)])


def quoted(run: Run) -> list[str]:
    """The contestants of the table: of torch's, the best of each work."""
    found = []
    for work in dict.fromkeys(key.split()[0] for key in run.rows):
        keys = [key for key in run.rows if key.startswith(f"{work} ")]
        best = max((key for key in keys if " torch:" in key), key=lambda key: Spread.of(rates(run, key)).median)
        found += [best, *(key for key in keys if " dpex:" in key)]
    return found


def problems(run: Run) -> list[str]:
    """What speaks against quoting a run."""
    rounds = {len(row) for row in run.rows.values()}
    wanted = set(run.settings["batches"])
    found = [f"{key} is missing" for key in sorted(wanted - set(run.rows))]
    found += [] if rounds and min(rounds) >= ROUNDS else [f"it has fewer than {ROUNDS} rounds"]
    short = run.settings["seconds"] < QUOTED_SECONDS
    return found + ([f"its windows are shorter than {QUOTED_SECONDS:g} s"] if short else [])


# -- the command -------------------------------------------------------------------------------------------------------


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.training.speed",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"of each measurement ({SECONDS:g})")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"measurements of each contestant ({ROUNDS})")
    parser.add_argument("--only", nargs="+", metavar="CONTESTANT", help="such as 'photographs dpex:auto'")
    parser.add_argument("--results", type=Path, default=runs.RESULTS / "local-speed.json", metavar="FILE")
    parser.add_argument("--keep", metavar="NAME", help="keep the run as results/training/speed-NAME.json")
    return parser.parse_args(arguments)


def run_rounds(options: argparse.Namespace) -> Run:
    """All measurements, in rounds; every second goes backwards. Raises MeasurementError."""
    import torch

    everybody = requests(
        options, has_gpu=torch.cuda.is_available(), has_ray=importlib.util.find_spec("ray") is not None
    )
    settings = {
        "seconds": options.seconds,
        "rounds": options.rounds,
        "batches": {one.key: one.batch for one in everybody},
    }
    run = runs.begun(SUBJECT, settings, options.results)
    for number in range(options.rounds):
        for request in reversed(everybody) if number % 2 else everybody:
            known = run.rows.get(request.key, [])
            if len(known) > number:
                continue
            told = run_module("benchmarks.training.pace", request.to_json(), request.seconds + REST_S)
            run = runs.with_row(run, request.key, [*known, json.loads(told.splitlines()[-1])])
            runs.write(run, options.results)
            print(_line(run, request.key), flush=True)
    return run


def _line(run: Run, key: str) -> str:
    pace = paces(run, key)[-1]
    rate = run.settings["batches"][key] * pace.course.rate
    return f"{key:<32}{rate:9.0f} images/s, {rates(run, key)[-1]:.0f} after learning, {_waits_of(pace)}"


def _waits_of(pace: Pace) -> str:
    told = f"waiting {pace.course.waiting:.0%}"
    return told if pace.gpu_stall_s is None else f"{told}, GPU stall {pace.gpu_stall_s / pace.course.seconds:.0%}"


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if everything was measured, and kept where that was asked for."""
    options = parse(arguments)
    try:
        run = run_rounds(options)
    except MeasurementError as error:
        print(error, file=sys.stderr)
        return 1
    return 0 if runs.kept_if_asked(run, options.keep, problems) else 1


if __name__ == "__main__":
    sys.exit(main())
