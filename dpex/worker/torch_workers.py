"""``seeding="batch"`` with PyTorch's own iterators: on systems other than Linux, and with ``local_engine="torch"``.

torch's iterators send each index with its ticket's seed, and torch's workers seed their generators before they fetch.
Dataset, collate function and ``get_worker_info()`` are the user's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from dpex._torch import MapDatasetFetcher, MultiProcessingDataLoaderIter, SingleProcessDataLoaderIter, pin_memory
from dpex.worker.batch_seeding import TicketSeeds, seed_ticket
from dpex.worker.current_batch import current
from dpex.worker.in_process import InProcessMaker
from dpex.worker.modes import Modes, modes_here
from dpex.worker.own_generators import OwnGenerators, Registered, own_generators, registered, reseeding


class _Ticket(NamedTuple):
    """An index with the ticket's seed, which torch's iterator sends in place of the index."""

    seed: int
    index: Any


class _WorkerStart:
    """``worker_init_fn`` of such a worker: prepares its process for tickets, then calls the user's."""

    def __init__(self, user: Callable[[int], None] | None, modes: Modes) -> None:
        self._user = user
        self._modes = modes
        self._registered = registered()

    def __call__(self, worker: int) -> None:
        current.begin_worker(is_per_batch=True)
        self._modes.stay()
        MapDatasetFetcher.fetch = _seeded(MapDatasetFetcher.fetch, self._registered)  # type: ignore[method-assign]
        if self._user is not None:
            self._user(worker)


def _seeded(fetch: Callable[[Any, Any], Any], registered: Registered) -> Callable[[Any, Any], Any]:
    own: dict[int, OwnGenerators | None] = {}

    def fetch_ticket(fetcher: Any, ticket: Any) -> Any:
        if isinstance(ticket, _Ticket):  # else it is of another loader, which the dataset uses
            current.seed = ticket.seed
            seed_ticket(ticket.seed)
            if id(fetcher) not in own:  # there is one in a worker
                own[id(fetcher)] = own_generators(fetcher.dataset, fetcher.collate_fn, registered)
            if (generators := own[id(fetcher)]) is not None:
                generators.reseed(ticket.seed)
            ticket = ticket.index
        return fetch(fetcher, ticket)

    return fetch_ticket


class SeededWorkersIter(MultiProcessingDataLoaderIter):
    """torch's iterator with workers. ``_worker_init_fn`` is wrapped as torch sets it, before it starts them."""

    def __init__(self, loader: Any) -> None:
        self._epoch = -1
        self._modes = modes_here()
        super().__init__(loader)

    @property
    def _worker_init_fn(self) -> Any:
        return self._start

    @_worker_init_fn.setter
    def _worker_init_fn(self, user: Callable[[int], None] | None) -> None:
        self._start = _WorkerStart(user, self._modes)

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        self._epoch += 1
        self._number = 0
        self._seeds = TicketSeeds(int(self._base_seed))
        super()._reset(loader, first_iter)

    def _next_index(self) -> Any:
        index = super()._next_index()  # type: ignore[no-untyped-call]
        ticket = _Ticket(self._seeds.of(self._number, self._epoch), index)
        self._number += 1
        return ticket


class SeededInProcessIter(SingleProcessDataLoaderIter):
    """torch's iterator without workers."""

    def __init__(self, loader: Any) -> None:
        super().__init__(loader)
        self._number = 0
        self._process = InProcessMaker(int(self._base_seed), modes_here())
        own = own_generators(self._dataset, self._collate_fn, registered())
        self._fetch = reseeding(self._dataset_fetcher.fetch, own)

    def _next_data(self) -> Any:
        index, number = self._next_index(), self._number  # type: ignore[no-untyped-call]
        self._number += 1
        data = self._process.make(self._fetch, index, number, 0)
        if self._pin_memory:
            data = pin_memory(data, self._pin_memory_device)
        return data
