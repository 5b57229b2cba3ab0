"""What samples free stays with the process, in which nobody has allocated and freed anything large before."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

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
    [("worker", "", True), ("batch", "", True), ("batch", "glibc.malloc.mmap_threshold=131072", False)],
)
def test_a_batch_faults_no_pages_in_unless_the_user_wants_them_given_back(
    seeding: str, tunables: str, learns: bool, tmp_path: Path
) -> None:
    """Each sample frees blocks of 0.35 and 0.7 MB: 200 pages and more, and 3,200 a batch, where they are given back."""
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    environment = os.environ | {"GLIBC_TUNABLES": tunables}
    done = subprocess.run(
        [sys.executable, str(script), seeding],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    faults = json.loads(done.stdout)
    assert (faults < 300) == learns, faults
