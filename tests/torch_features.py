"""What came after torch 2.4, the oldest that dpex supports: tests of it are skipped where torch lacks it."""

import inspect
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
import torch.multiprocessing
from torch._C._profiler import _ExperimentalConfig
from torch.utils.data import DataLoader
from torch.utils.data._utils.pin_memory import pin_memory

HAS_ACCELERATOR = hasattr(torch, "accelerator")
"""A name for whatever accelerator there is; before, `torch.cuda` was asked in its place."""


def _sends_meta() -> bool:
    try:
        ForkingPickler.dumps(torch.empty(1, device="meta"))
    except RuntimeError:
        return False
    return True


SENDS_META = _sends_meta()
"""Whether torch's own workers can send tensors that have no memory."""


def _needs(has: bool, what: str) -> Any:
    return pytest.mark.skipif(not has, reason=f"this torch has no {what}")


needs_in_order = _needs("in_order" in inspect.signature(DataLoader.__init__).parameters, "in_order=")
needs_kept_tuples = _needs(isinstance(pin_memory((1,)), tuple), "pinning that keeps tuples, but makes lists of them")
needs_cpu_count = _needs(hasattr(torch._utils, "cpu_count"), "cpu_count()")
needs_profiles_of_all_threads = _needs(
    "profile_all_threads" in (_ExperimentalConfig.__init__.__doc__ or ""), "profiles of all threads"
)
