"""Ray Train: `prepare_data_loader` keeps every argument of a `DpexDataLoader`, and `metrics_of` has figures to report.

It needs Ray Train (``pip install 'dpex[ray-train]'``).
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from typing import Any

from torch.utils.data import BatchSampler, DistributedSampler, IterableDataset, RandomSampler, SequentialSampler

from dpex.dataloader import DpexDataLoader
from dpex.errors import OptionError
from dpex.integrations import LoaderFigures
from dpex.system.user_warnings import warn


def prepare_data_loader(
    data_loader: Any, add_dist_sampler: bool = True, move_to_device: bool = True, auto_transfer: bool = True
) -> Any:
    """Prepare a loader as ``ray.train.torch.prepare_data_loader`` does, with every argument kept.

    With several training workers, Ray Train's own function builds a plain loader from yours. dpex's options survive
    that, but ``persistent_workers`` and ``multiprocessing_context`` do not. Here they do.

    Args:
        data_loader: The loader of this training worker. One that is no `DpexDataLoader` is left to Ray Train.
        add_dist_sampler: Whether to put in a `DistributedSampler`, where there are several training workers.
        move_to_device: Whether batches are moved to this training worker's device.
        auto_transfer: Whether they are moved ahead of need.

    Returns:
        A loader; `metrics_of` and `dpex.loader_behind` take it, and your own loader shows what it does.

    Raises:
        OptionError: The loader has a batch sampler of its own, which cannot be shared out.
    """
    context = importlib.import_module("ray.train").get_context()
    if add_dist_sampler and context.get_world_size() > 1 and _is_to_be_shared_out(data_loader):
        data_loader = _shared_out(data_loader, context.get_world_size(), context.get_world_rank())
        add_dist_sampler = False
    rays: Any = importlib.import_module("ray.train.torch").prepare_data_loader
    return rays(data_loader, add_dist_sampler, move_to_device, auto_transfer)


def metrics_of(*data_loaders: Any) -> Callable[[], dict[str, float]]:
    """Return a function that returns what the loaders did since its last call, for ``ray.train.report``.

    The names are those of `dpex.log_to`; several loaders need names of their own.

    Args:
        data_loaders: `DpexDataLoader`s, or what `prepare_data_loader` or Ray Train's own has made from them.

    Raises:
        OptionError: dpex does not make the batches of a loader.
    """
    readings = [LoaderFigures(loader) for loader in data_loaders]

    def figures() -> dict[str, float]:
        return {name: value for one in readings for name, value in one.take().items()}

    return figures


def _is_to_be_shared_out(loader: Any) -> bool:
    is_ours = isinstance(loader, DpexDataLoader) and not isinstance(loader.dataset, IterableDataset)
    return is_ours and not isinstance(loader.sampler, DistributedSampler)


def _shared_out(loader: DpexDataLoader[Any], world_size: int, rank: int) -> DpexDataLoader[Any]:
    """Return a copy of the loader over this training worker's share of the dataset."""
    if loader.batch_size is None and loader.batch_sampler is not None:
        raise OptionError(
            f"prepare_data_loader(): batch_sampler={loader.batch_sampler!r} cannot be shared out among "
            f"{world_size} training workers: have it draw the batches of one of them, and give add_dist_sampler=False"
        )
    is_in_order = isinstance(loader.sampler, SequentialSampler)
    if rank == 0 and not is_in_order and not isinstance(loader.sampler, RandomSampler):
        warn(
            f"prepare_data_loader(): a DistributedSampler replaces the {type(loader.sampler).__name__}; to keep that, "
            "give add_dist_sampler=False"
        )
    dataset: Any = loader.dataset
    sampler: Any = DistributedSampler(dataset, num_replicas=world_size, rank=rank, shuffle=not is_in_order)
    share = copy.copy(loader)
    batches = loader.batch_size and BatchSampler(sampler, loader.batch_size, loader.drop_last)
    vars(share).update(sampler=sampler, batch_sampler=batches or None, _runtime=loader._runtime, _iterator=None)
    return share
