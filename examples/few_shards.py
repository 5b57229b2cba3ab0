"""Two shards and slow decoding: torch's workers are as many as the shards, dpex has others decode.

    python examples/few_shards.py
    python examples/few_shards.py --seconds 4 --decode-ms 10

Two files hold encoded samples. Decoding one takes a wait (a sleep, as for a hardware decoder or a service), so that
more workers help on any machine. PyTorch's DataLoader is run with two workers, and with eight, of which six have no
shard to read; then dpex with num_workers="auto", which reads with two workers and decodes with as many as pay.
"""

import argparse
import pickle
import tempfile
import time
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from dpex import DpexDataLoader, decode_in_workers

SHARDS, BATCH = 2, 8


class Shards(IterableDataset[bytes]):
    """Encoded samples out of files, of which each worker reads its part; endless, if `repeats`."""

    def __init__(self, files: list[Path], repeats: bool = False) -> None:
        self.files = files
        self.num_shards = len(files)
        self.repeats = repeats

    def __iter__(self) -> Iterator[bytes]:
        worker = get_worker_info()
        mine = self.files if worker is None else self.files[worker.id :: worker.num_workers]
        while mine:
            for file in mine:
                yield from pickle.loads(file.read_bytes())
            if not self.repeats:
                return


def decode(wait_s: float, sample: bytes) -> torch.Tensor:
    """What the training step takes."""
    time.sleep(wait_s)
    return torch.frombuffer(bytearray(sample), dtype=torch.uint8)


def write_shards(folder: Path) -> list[Path]:
    """Write two files of 200 samples of 1 kB each."""
    files = [folder / f"{number}.shard" for number in range(SHARDS)]
    for number, file in enumerate(files):
        file.write_bytes(pickle.dumps([bytes([number, sample]) * 500 for sample in range(200)]))
    return files


def batches_per_s(loader: Iterable[torch.Tensor], seconds: float) -> float:
    """How many batches come in a second, in the second half of that time."""
    began, counted_from, count = time.monotonic(), 0.0, 0
    for _ in loader:
        now = time.monotonic()
        if now - began > seconds:
            break
        if now - began > seconds / 2:
            counted_from = counted_from or now
            count += 1
    return max(0, count - 1) / max(1e-9, time.monotonic() - (counted_from or began))


def main() -> None:
    """Run the three, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=12.0, help="how long each loader runs")
    parser.add_argument("--decode-ms", type=float, default=20.0, help="how long decoding a sample takes")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        files = write_shards(Path(folder))
        dataset = decode_in_workers(Shards(files, repeats=True), partial(decode, options.decode_ms / 1000))
        for workers in (2, 8):
            rate = batches_per_s(DataLoader(dataset, BATCH, num_workers=workers), options.seconds)
            print(f"torch, {workers} workers: {rate:.1f} batches/s", flush=True)
        with DpexDataLoader(dataset, BATCH, num_workers="auto") as loader:
            rate = batches_per_s(loader, options.seconds)
            workers = loader.stats().pools["local"].running
            decoding = f"{loader.num_workers} streams, {workers} workers decode"
            print(f'dpex, num_workers="auto": {rate:.1f} batches/s, {decoding}')
            print(loader.decisions[0].text)


if __name__ == "__main__":
    main()
