"""A contestant and a work become something that yields batches."""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.utils.data import DataLoader, Dataset

from benchmarks.contestants import RIVALS, Contestant

Opened = AbstractContextManager[Iterable[Any]]


def open_loader(contestant: Contestant, dataset: Dataset[Any], batch_size: int) -> Opened:
    """The contestant's loader; leaving the context closes it. Remote ones need Ray connected."""
    if contestant.engine == "torch":
        return nullcontext(DataLoader(dataset, **_options(contestant, batch_size)))
    if contestant.engine in ("dpex", "dpex-remote"):
        return _dpex(dataset, contestant, batch_size)
    if contestant.engine == "actors":
        from benchmarks.actors import ActorLoader

        return ActorLoader(dataset, batch_size, int(contestant.workers), contestant.prefetch or 1)
    if contestant.engine in RIVALS:
        from benchmarks.rivals import open_rival

        return open_rival(contestant, dataset, batch_size)
    raise ValueError(f"there is no loader called {contestant.engine!r}")


def _options(contestant: Contestant, batch_size: int) -> dict[str, Any]:
    options: dict[str, Any] = {"batch_size": batch_size, "num_workers": contestant.workers}
    if contestant.prefetch is not None:
        options["prefetch_factor"] = contestant.prefetch
    return options


def _dpex(dataset: Dataset[Any], contestant: Contestant, batch_size: int) -> Opened:
    from dpex import DpexDataLoader

    options = _options(contestant, batch_size)
    if contestant.seeding is not None:
        options["seeding"] = contestant.seeding
    if contestant.engine == "dpex-remote":
        options["distribute_mode"] = True
    return DpexDataLoader(dataset, **options)
