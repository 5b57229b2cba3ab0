"""The indices of one pass. Each is drawn from the sampler exactly once, even if an exception interrupts the draw.

One call into C code moves an index from the sampler into `Draws.drawn`, where it stays until its batch is delivered.
torch's samplers run Python code only as they begin (`dpex.engine.samplers.in_c`). If a signal handler raises inside
such a sampler, `Draws` makes a second iterator from the random states before the first draw, and skips the drawn
indices. A user's generator ends with such an exception, with any loader. `Draws` then raises an error after the last
index, as the epoch would look complete otherwise.
"""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain, islice, repeat
from types import GeneratorType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DistributedSampler

from dpex.engine.samplers import SamplerStart, are_known, generators_of, in_c, indices_from, samplers_within
from dpex.errors import InterruptedSamplerError
from dpex.schedule.names import attribute
from dpex.system.signals import is_from_handler, reraise_if_from_handler, taken
from dpex.system.user_warnings import is_first, warn

_CANNOT_TELL = "state_dict() of the sampler failed, so its state is not kept: a later run draws its order again"
_ENDED = (
    "{kind}, raised by a signal handler, ended the sampler's generator: this epoch has only {drawn} batches. The next "
    "calls of next() return the batches that are left. Begin a new epoch for all batches, or use a sampler whose "
    "iterator is not a generator, which can continue after such an exception"
)
_CHANGED = (
    "the dataset or the sampler was changed during this epoch, and then a signal handler raised an exception in the "
    "sampler: the rest of its order is lost, and this epoch has only {drawn} batches. Begin a new epoch for all "
    "batches, and change neither during an epoch"
)


class BegunDraws(NamedTuple):
    """Indices of which the first was drawn, and the random states before the first draw of the pass."""

    start: SamplerStart
    first: list[Any]
    source: Iterator[Any]

    @classmethod
    def of(cls, start: SamplerStart, source: Iterator[Any]) -> BegunDraws:
        """Draw the first index of ``source`` from the present random states."""
        return cls(start, list(taken(source, 1)), source)


class Draws:
    """See the module.

    Args:
        source: torch's unused iterator of ``index_sampler``.
        copies: True if the sampler may reuse the list of a batch, so that each index is copied.
        stateful: The sampler that has a ``state_dict()``, or None.
        every: Batches between two states of ``stateful``. The first state follows the first batch: before it, a sampler
            may still report the previous epoch.
        note: Receives a number of batches with the state of ``stateful`` after these.

    Attributes:
        drawn: Indices of all undelivered batches and of the latest batch, with their numbers, in order.
        start: The random states before the first draw; None until then.
        first: The number of the first batch.
    """

    def __init__(
        self,
        index_sampler: Any,
        generator: torch.Generator | None,
        source: Iterator[Any],
        *,
        copies: bool,
        is_stream: bool,
        stateful: Any = None,
        every: float = math.inf,
        note: Callable[[tuple[int, Any]], object] = lambda _: None,
    ) -> None:
        self.drawn: deque[tuple[Any, int]] = deque()
        self.start: SamplerStart | None = None
        self._copies = copies
        self._index_sampler = index_sampler
        self._generator = generator
        self._is_stream = is_stream
        self._is_known = are_known(index_sampler)
        self._stateful = stateful
        self._every = every
        self._note = note
        self._source = source
        self._indices: Iterator[Any] | None = None
        self.first: int = 0
        self._settled = 0
        self._due: float = 1
        self._lost_to: str | None = None
        """The class name of the exception of a handler that came out of the latest draw. The frames of the exception
        itself would keep the iterator."""

    def begin_at(self, first: int, begun: BegunDraws) -> None:
        """Draw batch ``first`` and all later batches from a sampler that begins there."""
        self.first = self._settled = first
        self._due = first + 1
        self.start = begun.start
        self._use(begun)

    def _use(self, begun: BegunDraws) -> None:
        self._source = begun.source
        self._indices = chain(begun.first, taken(begun.source))

    # -- drawing -------------------------------------------------------------------------------------------------

    def draw(self, end: int) -> None:
        """Draw all batches before number ``end``, or all that are left."""
        drawn = self.drawn
        first = drawn[-1][1] + 1 if drawn else self.first
        try:
            if self._lost_to is not None and not self._goes_on():
                return
            self._lost_to = "an exception"  # until the draw is complete, or its exception is known
            if self._indices is None:
                self._begin(first)
            assert self._indices is not None
            if self._copies or self._stateful is not None:
                self._draw_singly(self._indices, first, end)
            else:
                drawn.extend(zip(islice(self._indices, max(0, end - first)), range(first, end), strict=False))
            self._lost_to = None
        except BaseException as error:
            self._lost_to = type(error).__name__ if is_from_handler(error) else None
            raise

    def _draw_singly(self, indices: Iterator[Any], first: int, end: int) -> None:
        self._settle()
        for number in range(first, end):
            self.drawn.extend(zip(islice(indices, 1), (number,), strict=False))
            self._settle()

    def _settle(self) -> None:
        """Copy the latest index, and ask the sampler for its state, before the next draw."""
        if not self.drawn or self.drawn[-1][1] < self._settled:
            return
        index, number = self.drawn[-1]
        if self._copies:
            self.drawn[-1] = _as_drawn(index), number
        if self._stateful is not None and number + 1 >= self._due:
            self._ask(number + 1)
        self._settled = number + 1

    def _ask(self, drawn: int) -> None:
        self._due = drawn + self._every
        try:
            state = copy.deepcopy(self._stateful.state_dict())
        except Exception as error:
            reraise_if_from_handler(error)
            self._due = math.inf
            if is_first(_CANNOT_TELL):
                warn(f"{_CANNOT_TELL}: {error!r}")
            return
        self._note((drawn, state))

    @property
    def length(self) -> int:
        return len(self.drawn)

    def indices(self, first: int, end: int) -> list[Any]:
        """Return the indices of batches from number ``first`` to ``end`` that were drawn."""
        at = first - self.drawn[0][1] if self.drawn else 0
        return [self.drawn[place][0] for place in range(at, min(at + end - first, len(self.drawn)))]

    def has(self, number: int) -> bool:
        return bool(self.drawn) and self.drawn[-1][1] >= number

    def forget(self, number: int) -> None:
        """Drop the indices of batches before ``number``, which were delivered."""
        drawn = self.drawn
        while len(drawn) > 1 and drawn[0][1] < number:
            drawn.popleft()

    # -- exceptions ----------------------------------------------------------------------------------------------

    def check_end(self) -> None:
        """Raise if the sampler has ended with an exception of a handler, once.

        Raises:
            InterruptedSamplerError: The sampler would have had more.
        """
        if self._lost_to is not None:
            drawn = self.drawn[-1][1] + 1 if self.drawn else self.first
            error = InterruptedSamplerError(_ENDED.format(kind=self._lost_to, drawn=drawn))
            self._lost_to = None
            raise error

    def _goes_on(self) -> bool:
        """Return False if the exception of the latest draw has ended the sampler permanently."""
        if self._is_known:
            self._indices = None
        elif isinstance(self._source, GeneratorType) and self._source.gi_frame is None:
            return False
        return True

    def _begin(self, first: int) -> None:
        """Begin to draw, or resume at batch ``first`` after an exception."""
        sampler, start = self._index_sampler, self.start
        is_new = start is None
        if start is None:
            self.start = start = SamplerStart.now(sampler, self._generator, is_stream=self._is_stream)
        if not self._is_known:
            self._indices = taken(self._source)
        elif is_new:
            self._use(BegunDraws.of(start, in_c(sampler) or self._source))
        else:
            self._begin_again(start, first)

    def _begin_again(self, start: SamplerStart, first: int) -> None:
        """Draw batch ``first`` and those behind it from the random states before the first draw.

        torch's global generator is put back, and so are the epochs of samplers. That is one call into C code, so that
        no exception leaves a part of them. A generator that belongs to a sampler stays as these draws leave it.
        """
        sampler = self._index_sampler
        samplers = [each for _, each in samplers_within(sampler)]
        shared = [torch.default_generator] if "torch" in start.shared and (first or not start.is_now) else []
        told = [each for each in samplers if type(each) is DistributedSampler]
        states, epochs = [each.get_state() for each in shared], [each.epoch for each in told]
        back = chain(map(torch.Generator.set_state, shared, states), map(setattr, told, repeat("epoch"), epochs))
        latest = list(self.drawn)[-1:]
        try:
            for each in shared:
                each.set_state(start.shared["torch"])
            for name, each in generators_of(sampler, self._generator).items():
                if name in start.generators and any(attribute(one, "generator") is each for one in samplers):
                    each.set_state(start.generators[name])
            for name, each in samplers_within(sampler):
                if name in start.epochs:
                    each.set_epoch(start.epochs[name])
            source = indices_from(first - len(latest), sampler)
            again = list(taken(source, len(latest)))
            self._use(BegunDraws.of(start, source))
        finally:
            deque(back, maxlen=0)
        if latest and _are_numbers(latest[0][0]) and again != [latest[0][0]]:
            self._indices = iter(())
            raise InterruptedSamplerError(_CHANGED.format(drawn=first))


def _are_numbers(index: Any) -> bool:
    return type(index) is int or (type(index) is list and all(type(each) is int for each in index))


def _as_drawn(index: Any) -> Any:
    """Return an index that stays as it is, though the sampler may fill the same list again for the next batch."""
    if isinstance(index, torch.Tensor):
        return index.clone()
    return index.copy() if type(index) in (list, np.ndarray) else index
