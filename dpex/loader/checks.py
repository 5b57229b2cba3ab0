"""Check a new loader: values of torch's arguments, and options that do not suit its data or its workers. Also start
processes and imports that must begin early."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from operator import index
from typing import TYPE_CHECKING, Any, SupportsFloat, SupportsIndex

import torch
from torch.utils.data import MapDataPipe

from dpex._torch import DatasetKind
from dpex.autotune.config import AutotuneConfig
from dpex.errors import OptionError
from dpex.loader.sizing import Sizing, is_daemonic
from dpex.options import DEFAULTS, checked
from dpex.schedule.names import is_asynchronous
from dpex.system.ray_package import is_ray_connected, require_ray
from dpex.system.user_warnings import warn

if TYPE_CHECKING:
    from dpex.loader.base_loader import BaseLoader


has_gil: Callable[[], bool] = getattr(sys, "_is_gil_enabled", lambda: True)
"""Return False if this Python runs free-threaded: neither PYTHON_GIL=1 nor an extension module has enabled its GIL.

Threads of dpex share deques, dicts and tuples that have no lock of their own. One thread writes, and others copy them
in a single C call. Only the GIL (global interpreter lock) makes such a copy atomic.
"""


def check_torch_arguments(dataset: Any, num_workers: Any, prefetch_factor: Any, timeout: Any, generator: Any) -> None:
    """Check values that torch's constructor accepts wrongly, or refuses without naming them. Messages contain torch's
    words.

    Raises:
        OptionError: The dataset is missing, an argument is not numeric, not whole or too small, or the generator is not
            torch's.
    """
    if dataset is None:
        raise OptionError(
            "dataset=None: give a map-style dataset (with __getitem__ and __len__) or an iterable one (with __iter__)"
        )
    if num_workers != "auto" and not _is_whole(num_workers, least=0):
        words = "num_workers option should be non-negative; use num_workers=0 to disable multiprocessing"
        raise OptionError(
            f"num_workers={num_workers!r}: {_opening(num_workers, words)} a whole number of at least 0, or 'auto' for "
            "a number that dpex finds and changes while training runs"
        )
    if not (isinstance(timeout, SupportsFloat) and float(timeout) >= 0):
        opening = _opening(timeout, "timeout option should be non-negative")
        raise OptionError(f"timeout={timeout!r}: {opening} a number of seconds, or 0 to wait without limit")
    # if num_workers=0, torch itself refuses every prefetch_factor
    if num_workers != 0 and prefetch_factor is not None and not _is_whole(prefetch_factor, least=1):
        opening = _opening(prefetch_factor, "prefetch_factor option should be non-negative")
        raise OptionError(
            f"prefetch_factor={prefetch_factor!r}: {opening} a whole number of at least 1 (batches per worker), or "
            "None for 2"
        )
    if generator is not None and not isinstance(generator, torch.Generator):
        raise OptionError(
            f"generator={generator!r}: give a torch.Generator, such as torch.Generator().manual_seed(3), or None"
        )


def _is_whole(value: Any, least: int) -> bool:
    return isinstance(value, SupportsIndex) and index(value) >= least


def _opening(value: Any, torchs: str) -> str:
    """Return "give", the start of a remedy. If the value is negative, the sentence that torch raises comes first."""
    return f"{torchs}. Give" if isinstance(value, SupportsFloat) and float(value) < 0 else "give"


def check_place(loader: BaseLoader[Any]) -> None:
    """Check that Ray is installed if workers run on a cluster. If they do not, warn of a ``head_address``.

    Raises:
        ClusterError: Ray is not installed.
    """
    if loader.distribute_mode is True:
        require_ray()
    if loader.distribute_mode is False and loader.head_address != "auto":
        warn(
            f"head_address={loader.head_address!r} has no effect without distribute_mode: give "
            "distribute_mode=True for workers on that cluster",
            UserWarning,
        )


def check_settings(loader: BaseLoader[Any]) -> None:
    """Raise OptionError for a setting that does not work with the loader's data, its workers or this system."""
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
        _refuse(policy, why_linux or _why_no_policy(loader))
    if isinstance(autotune, AutotuneConfig) and not is_daemonic():
        if loader.num_workers == 0:
            why = "num_workers=0 has none: give num_workers='auto', or a number to start from"
            _refuse("autotune=AutotuneConfig(...) tunes workers", why)
        if autotune.max_local == 0 and loader.distribute_mode is False:
            why = "this leaves no worker: give distribute_mode=True for workers on a cluster"
            _refuse("AutotuneConfig(max_local=0) without distribute_mode", why)
    if Sizing(loader).is_tuned:
        from dpex.autotune.runtime.trace import check as check_trace
        from dpex.autotune.runtime.tuned import start_of

        check_trace(autotune or AutotuneConfig(), os.environ)
        start_of(autotune or AutotuneConfig())


def _why_no_policy(loader: BaseLoader[Any]) -> str:
    """Return why the loader cannot apply its `SamplePolicy`; "" if it can."""
    if loader._dataset_kind == DatasetKind.Iterable or isinstance(loader.dataset, MapDataPipe):
        return "a stream decides itself how it continues after an error: use a map-style dataset"
    if loader.sample_policy.timeout_s is not None:
        if loader.num_workers == 0 and not is_asynchronous(loader.dataset):
            return "the training process cannot be ended for a sample that hangs: give a number of workers, or 'auto'"
        if loader.local_pool is not None:
            return f"a local_pool of your own ({type(loader).__name__}) does not watch its samples: leave timeout_s out"
    return ""


def _refuse(what: object, why: str) -> None:
    if why:
        raise OptionError(f"{what}: {why}; or leave it out")


def start_fork_server_early(loader: BaseLoader[Any]) -> None:
    """Start the clean server now if Ray is connected. The server, from which local workers descend, has no threads of
    Ray, but takes seconds to start."""
    is_tuned = bool(loader._is_auto or loader.autotune)
    may_be_local = is_tuned if loader.distribute_mode is True else loader.num_workers > 0
    if may_be_local and not is_daemonic() and is_ray_connected():
        from dpex.pools.local.clean_server import start_early

        start_early(loader.multiprocessing_context)


def import_iterators(loader: BaseLoader[Any]) -> None:
    """Import the modules of the loader's iterators, because the first batch would wait for their import."""
    if not loader.num_workers:
        import dpex.engine.in_process

        return
    import dpex.engine.with_workers
    import dpex.pools.factory

    if Sizing(loader).is_tuned:
        import dpex.autotune.runtime.tuner
    if loader.distribute_mode is True:
        import dpex.pools.ray.nodes  # noqa: F401


def checked_option(loader: BaseLoader[Any], name: str, value: Any) -> Any:
    """Return the value of an option that is assigned to a loader.

    Raises:
        OptionError: The loader's other options, or the option itself, exclude the value.
    """
    options = {one: getattr(loader, one) for one in DEFAULTS} | {name: value}
    found = checked(options, is_auto=loader._is_auto, is_asynchronous=is_asynchronous(loader.dataset))[name]
    return parsed_device(found) if name == "device" else found


def set_option(loader: BaseLoader[Any], name: str, value: Any) -> Any:
    """Set an option that is assigned to a loader, and return it, checked. It applies from the next ``iter()`` on.

    Raises:
        OptionError: The loader's other options, its data, its workers or this system exclude the value.
    """
    before, value = vars(loader)[name], checked_option(loader, name, value)
    vars(loader)[name] = value
    try:
        check_settings(loader)
    except BaseException:
        vars(loader)[name] = before
        raise
    if name == "autotune":
        loader._runtime.dismiss_tuner()
    return value


def parsed_device(device: Any) -> torch.device | None:
    """Return a loader's ``device`` as torch's type. `dpex.device.devices.opened` tests if this process can use it.

    Raises:
        OptionError: ``device`` names no device to which batches can be copied.
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
