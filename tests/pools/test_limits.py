"""Limits of the system: workers without descriptors, and containers without memfd_create, are refused."""

import platform

import pytest
from programs import ran

SCRIPT = """
import ctypes, os, resource, struct, sys, warnings
import torch
import dpex

class Large(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.full((1 << 14,), float(index))

def limit(spare):
    used = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + spare,) * 2)

def refuse(number, error):
    # a filter of seccomp(2), as containers have one: this system call fails
    code = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, 0x50000 | error), (0x06, 0, 0, 0x7FFF0000)]
    filters = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in code))
    program = struct.pack("HxxxxxxQ", len(code), ctypes.addressof(filters))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, program, 0, 0) == 0, ctypes.get_errno()

def numbers(loader):
    return [int(value) for batch in loader for value in batch[:, 0]]

"""


def output_of(body: str) -> str:
    done = ran("-c", SCRIPT + body)
    return done.stdout + done.stderr


@pytest.mark.parametrize(("spare", "seeding"), [(30, "batch"), pytest.param(16, "worker", marks=pytest.mark.long)])
def test_workers_without_descriptors_are_refused(spare: int, seeding: str) -> None:
    out = output_of(f"""
limit({spare})
loader = dpex.DpexDataLoader(Large(), 2, num_workers=24, seeding={seeding!r})
assert numbers(loader) == list(range(64))
assert 1 <= loader.stats().pools["local"].running < 24, loader.stats()
""")
    assert "Could not start all of the 24 local workers" in out
    assert "Too many open files" in out


def test_growth_without_descriptors_is_refused() -> None:
    out = output_of("""
loader = dpex.DpexDataLoader(Large(), 2, num_workers=2, seeding="batch")
batches = iter(loader)
got = numbers([next(batches)])
limit(10)
loader.resize(local=30)
got += numbers(batches)
assert got == list(range(64))
assert os.dup(0) and os.dup(0), "some descriptors are left to the training"
""")
    assert "Could not start all of the 30 local workers" in out


NUMBERS = {"x86_64": 319, "aarch64": 279}


@pytest.mark.skipif(platform.machine() not in NUMBERS, reason="the number of memfd_create is not known here")
def test_error_without_memfd_create_names_the_remedy() -> None:
    out = output_of(f"""
refuse({NUMBERS[platform.machine()]}, 1)
try:
    numbers(dpex.DpexDataLoader(Large(), 2, num_workers=1))
except OSError as error:
    print(error)
""")
    assert "this container refuses memfd_create" in out
    assert "allow the call (seccomp)" in out
