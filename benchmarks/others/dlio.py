"""DLIO, the program behind MLPerf Storage, as it is: `dlio_benchmark.main` beside `dpex run -m dlio_benchmark.main`.

DLIO's accelerator is a sleep. It reports the accelerator utilisation (AU: the share of the time that the accelerator
would have computed) and samples/s; this command adds the memory of the process tree.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from benchmarks.machine import process_tree, tree_bytes

HERE = Path(__file__).parent
DATA = Path(os.environ.get("DPEX_BENCH_DATA", HERE.parent / "data")) / "dlio"
RESULTS = HERE.parent / "results" / "others"
MEMORY_EVERY_S = 0.5


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One of MLPerf Storage's workloads. ``record_bytes``: of a decoded sample; ``threads``: DLIO's `read_threads`."""

    format: str
    files: int
    record_bytes: int
    batch: int
    threads: int
    step_s: float
    epochs: int = 3


WORKLOADS = {
    "retinanet-47ms": Workload(
        format="jpeg", files=960, record_bytes=322_957, batch=24, threads=8, step_s=0.04755, epochs=5
    ),
    "retinanet-200ms": Workload(format="jpeg", files=960, record_bytes=322_957, batch=24, threads=8, step_s=0.2),
    "unet3d": Workload(format="npz", files=24, record_bytes=146_600_628, batch=7, threads=4, step_s=0.636, epochs=5),
}
LOADERS = {
    "torch": ["-m", "dlio_benchmark.main"],
    "dpex": ["-m", "dpex", "run", "--num-workers", "keep", "-m", "dlio_benchmark.main"],
    "dpex auto": ["-m", "dpex", "run", "-m", "dlio_benchmark.main"],
}


def folder_of(name: str) -> Path:
    """Return the folder with the files of a workload, which those share that differ in the step alone."""
    return DATA / name.partition("-")[0]


def overrides(name: str, output: Path, *, generate: bool) -> list[str]:
    """Return DLIO's arguments for a workload."""
    workload = WORKLOADS[name]
    values: dict[str, Any] = {
        "framework": "pytorch",
        "workflow.generate_data": generate,
        "workflow.train": not generate,
        "workflow.checkpoint": False,
        "checkpoint.checkpoint_folder": output / "checkpoints",
        "dataset.data_folder": folder_of(name),
        "dataset.format": workload.format,
        "dataset.num_files_train": workload.files,
        "dataset.num_samples_per_file": 1,
        "dataset.num_subfolders_train": 0,
        "dataset.num_subfolders_eval": 0,
        "dataset.num_files_eval": 0,
        "workflow.evaluation": False,
        "dataset.record_length": workload.record_bytes,
        "reader.data_loader": "pytorch",
        "reader.batch_size": workload.batch,
        "reader.read_threads": workload.threads,
        "reader.file_shuffle": "seed",
        "reader.sample_shuffle": "seed",
        "train.epochs": workload.epochs,
        "train.computation_time": workload.step_s,
        "metric.au": 0.9,
    }
    return [f"++workload.{key}={value}" for key, value in values.items()] + [f"hydra.run.dir={output}"]


def environment() -> dict[str, str]:
    """Return the environment of DLIO: the stand-ins for packages that it imports and does not use."""
    path = os.pathsep.join([str(HERE / "stand_ins"), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path.rstrip(os.pathsep), "OMP_NUM_THREADS": "1"}


class Memory(threading.Thread):
    """Samples the memory of a process tree. ``peak_bytes``: the highest sum of proportional set sizes."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.pid = pid
        self.peak_bytes = 0
        self.most_processes = 0
        self.start()

    def run(self) -> None:
        while psutil.pid_exists(self.pid):
            try:
                self.peak_bytes = max(self.peak_bytes, tree_bytes(self.pid))
                self.most_processes = max(self.most_processes, len(process_tree(self.pid)))
            except psutil.Error:
                pass
            time.sleep(MEMORY_EVERY_S)


def prepare(name: str) -> None:
    """Let DLIO write the files of a workload, once."""
    folder = folder_of(name)
    if (folder / "complete").exists():
        return
    with tempfile.TemporaryDirectory() as output:
        arguments = overrides(name, Path(output), generate=True)
        subprocess.run([sys.executable, *LOADERS["torch"], *arguments], env=environment(), check=True)
    (folder / "complete").touch()


def measure(name: str, loader: str) -> dict[str, Any]:
    """Run DLIO once. Returns AU in percent and samples/s of each epoch, peak memory in bytes, and the exit status."""
    with tempfile.TemporaryDirectory() as output:
        arguments = overrides(name, Path(output), generate=False)
        start_s = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, *LOADERS[loader], *arguments],
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        memory = Memory(process.pid)
        printed, _ = process.communicate()
        if process.returncode:
            raise RuntimeError(f"{loader} on {name} ended with {process.returncode}:\n{printed[-3000:]}")
        metric = json.loads((Path(output) / "summary.json").read_text())["metric"]
    return {
        "workload": name,
        "loader": loader,
        "au_percent": metric["train_au_percentage"],
        "samples_per_s": metric["train_throughput_samples_per_second"],
        "peak_pss_bytes": memory.peak_bytes,
        "processes": memory.most_processes,
        "seconds": time.monotonic() - start_s,
    }


def table(results: list[dict[str, Any]]) -> str:
    """Return medians over rounds, each of the mean over epochs, as a Markdown table."""
    lines = [
        "| workload | loader | AU | samples/s | peak memory | processes |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name in WORKLOADS:
        for loader in LOADERS:
            found = [one for one in results if (one["workload"], one["loader"]) == (name, loader)]
            if found:
                au, rate = (
                    median(sum(one[key]) / len(one[key]) for one in found) for key in ("au_percent", "samples_per_s")
                )
                memory = median(one["peak_pss_bytes"] for one in found) / 1e9
                processes = round(median(one["processes"] for one in found))
                lines.append(f"| {name} | {loader} | {au:.1f} % | {rate:.0f} | {memory:.2f} GB | {processes} |")
    return "\n".join(lines)


def main() -> None:
    """Measure the loaders in turn, and keep each result as a line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.others.dlio", description=__doc__)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--loaders", nargs="+", choices=LOADERS, default=list(LOADERS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--results", type=Path, default=RESULTS / "local-dlio.jsonl")
    options = parser.parse_args()
    results = []
    for name in options.workloads:
        prepare(name)
        for number in range(options.rounds):
            for loader in options.loaders if number % 2 == 0 else reversed(options.loaders):
                results.append(measure(name, loader))
                options.results.parent.mkdir(parents=True, exist_ok=True)
                with options.results.open("a") as file:
                    file.write(json.dumps(results[-1]) + "\n")
                print(table(results[-1:]).splitlines()[-1], flush=True)
    print(table(results))


if __name__ == "__main__":
    main()
