"""The memory that processes have for themselves."""

import os

from dpex.system.meter import private_bytes


def test_memory_of_this_process_grows_with_what_it_holds() -> None:
    before = private_bytes([os.getpid()])
    held = bytearray(b"x" * (64 << 20))
    assert private_bytes([os.getpid()]) > before + len(held) // 2


def test_processes_that_ended_have_none() -> None:
    assert private_bytes([]) == 0.0
    assert private_bytes([2**22 + 1]) == 0.0
