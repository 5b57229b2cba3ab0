"""Checks of a new loader: options that exclude its data or its workers; and processes that must begin early."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import MapDataPipe

from dpex._torch import DatasetKind
from dpex.autotune.config import AutotuneConfig
from dpex.errors import OptionError
from dpex.loader.sizing import is_daemonic
from dpex.schedule.names import is_asynchronous
from dpex.system.ray_package import is_ray_connected

if TYPE_CHECKING:
    from dpex.loader.base_loader import BaseLoader


has_gil: Callable[[], bool] = getattr(sys, "_is_gil_enabled", lambda: True)
"""Return False in a free-threaded Python in which neither PYTHON_GIL=1 nor an extension module has enabled the lock.

Threads of dpex share deques, dicts and tuples without a lock, because one thread writes and others copy them within one
call of C. Only the global interpreter lock keeps such a copy whole.
"""


def check_settings(loader: BaseLoader[Any]) -> None:
    """Raise OptionError for a setting that the loader's data, its workers or this system exclude."""
    if not has_gil():
        raise OptionError(
            "this Python runs without its global interpreter lock, on which dpex relies between its threads: set "
            "PYTHON_GIL=1, or use a build of Python that is not free-threaded"
        )
    share, policy, autotune = loader.worker_config.share, loader.sample_policy, loader.autotune
    is_stream = loader._dataset_kind == DatasetKind.Iterable
    why_linux = f"dpex's own workers need Linux, and this is {sys.platform}" if sys.platform != "linux" else ""
    if share is not None:
        why = why_linux
        if is_stream:
            why = "each worker of an IterableDataset reads a stream of its own: use a map-style dataset"
        elif loader.num_workers == 0:
            why = "with num_workers=0 each training makes its own batches: give a number of workers, or 'auto'"
        _refuse(f"WorkerConfig(share={share!r})", why)
    if policy.is_on:
        why = why_linux
        if is_stream or isinstance(loader.dataset, MapDataPipe):
            why = "a stream decides itself how it continues after an error: use a map-style dataset"
        elif policy.timeout_s is not None and loader.num_workers == 0 and not is_asynchronous(loader.dataset):
            why = "the training process cannot be ended for a sample that hangs: give a number of workers, or 'auto'"
        _refuse(policy, why)
    if isinstance(autotune, AutotuneConfig) and not is_daemonic():
        if loader.num_workers == 0:
            why = "num_workers=0 has none: give num_workers='auto', or a number to start from"
            _refuse("autotune=AutotuneConfig(...) tunes workers", why)
        if autotune.max_local == 0 and loader.distribute_mode is False:
            why = "this leaves no worker: give distribute_mode=True for workers on a cluster"
            _refuse("AutotuneConfig(max_local=0) without distribute_mode", why)


def _refuse(what: object, why: str) -> None:
    if why:
        raise OptionError(f"{what}: {why}; or leave it out")


def start_fork_server_early(loader: BaseLoader[Any]) -> None:
    """Start the process that forks local workers, under Ray and before the dataset is used, because it must have no Ray
    threads."""
    is_tuned = bool(loader._is_auto or loader.autotune)
    may_be_local = is_tuned if loader.distribute_mode is True else loader.num_workers > 0
    if may_be_local and not is_daemonic() and is_ray_connected():
        from dpex.pools.local.clean_server import start_early

        start_early(loader.multiprocessing_context)


def check_generator(generator: Any) -> None:
    """Raise OptionError unless ``generator`` is torch's, or None."""
    if generator is not None and not isinstance(generator, torch.Generator):
        raise OptionError(
            f"generator={generator!r}: give a torch.Generator, such as torch.Generator().manual_seed(3), or None"
        )


def parsed_device(device: Any) -> torch.device | None:
    """Return a loader's ``device``. `dpex.device.devices.opened` finds out if this process can use it.

    Raises:
        OptionError: It names no device that batches can be copied to.
    """
    if device is None:
        return None
    parsed = None
    if isinstance(device, (str, torch.device)):
        with contextlib.suppress(RuntimeError):
            parsed = torch.device(device)
    if parsed is None:
        raise OptionError(
            f"device={device!r}: give a torch.device or its name, such as 'cuda', 'cuda:1' or 'cpu', or None"
        )
    if parsed.type == "meta" or not (parsed.type == "cpu" or hasattr(torch, parsed.type)):
        raise OptionError(f"device={device!r}: no batch can be copied there; give an accelerator, 'cpu' or None")
    return parsed
