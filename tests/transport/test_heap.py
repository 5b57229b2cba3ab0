"""What the samples of a batch free stays with the process for the next batch, and no more than that.

The scripts are processes of their own, in which nobody has allocated and freed anything large before.
"""

import json
import mmap
import os
import platform
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from families import Of, worker_pids
from programs import ran
from waiting import until

from dpex import DpexDataLoader

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the heap is not glibc's")

_SCRIPT = """
import resource, sys
import numpy as np
import torch
from torch.utils.data import Dataset
from dpex import DpexDataLoader

class Temporaries(Dataset):
    def __len__(self):
        return 480

    def __getitem__(self, index):
        wide = np.ones(88_200, np.float32)
        return torch.from_numpy((wide * 2.0).astype(np.float64)[:40_000].astype(np.float32) + np.float32(index))

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

class Counted(Temporaries):
    def __getitem__(self, index):
        sample = super().__getitem__(index)
        sample[0] = faults()
        return sample

if sys.argv[1] == "worker process":
    seen = [int(batch[0, 0]) for batch in DpexDataLoader(Counted(), batch_size=16, num_workers=1)]
    print((seen[-1] - seen[9]) / 20)
    sys.exit()

batches = iter(DpexDataLoader(Temporaries(), batch_size=16, num_workers=0, seeding=sys.argv[1]))
for _ in range(10):
    batch = next(batches)
assert batch.nbytes > 1 << 20
before = faults()
for _ in range(20):
    batch = next(batches)
print((faults() - before) / 20)
"""


@pytest.mark.parametrize(
    ("seeding", "tunables", "learns"),
    [("batch", "", True), ("batch", "glibc.malloc.mmap_threshold=131072", False), ("worker process", "", True)],
)
def test_a_batch_causes_no_page_faults_unless_trimming_is_set(
    seeding: str, tunables: str, learns: bool, tmp_path: Path
) -> None:
    """Each sample frees blocks of 0.35 and 0.7 MB: 200 pages and more, and 3,200 a batch, where they are given back."""
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    environment = os.environ | {"GLIBC_TUNABLES": tunables}
    faults = json.loads(ran(script, seeding, env=environment).stdout)
    assert (faults < 300) == learns, faults


SPIKE_BYTES = 256 << 20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def parses_at(index: int) -> int:
    """Sample: bytes that the process has. Making sample 4 takes `SPIKE_BYTES` for a moment, in small pieces."""
    if index == 4:
        pieces = [bytes(2000) for _ in range(SPIKE_BYTES // 2000)]
        del pieces
    return resident_bytes()


def test_a_worker_gives_back_what_one_unusual_sample_took() -> None:
    sizes = [int(batch) for batch in DpexDataLoader(Of(parses_at, 8), batch_size=1, num_workers=1)]
    assert max(sizes[4:]) - max(sizes[:4]) < SPIKE_BYTES // 2


def large_at(index: int) -> torch.Tensor:
    """Sample: 4 MB."""
    return torch.full((1 << 20,), float(index))


@pytest.mark.parametrize("seeding", ["worker", "batch"])
def test_a_worker_without_work_gives_back_what_batches_need(seeding: Any) -> None:
    with DpexDataLoader(Of(large_at, 40), 10, num_workers=1, persistent_workers=True, seeding=seeding) as loader:
        iterator = iter(loader)
        first = next(iterator)
        (pid,) = worker_pids(iterator)
        process = psutil.Process(pid)
        until(lambda: process.memory_info().rss > SPIKE_BYTES // 2)  # three batches and their samples: 160 MB
        for batch in iterator:
            assert len(batch) == 10
        del batch
        until(lambda: process.memory_info().shared + process.memory_full_info().uss < first.nbytes + (64 << 20))
        assert (first[:, -1] == torch.arange(10)).all(), "a batch that is in use is kept"
        again = torch.cat([batch[:, -1] for batch in loader])
        assert torch.equal(again, torch.arange(40, dtype=torch.float32))
