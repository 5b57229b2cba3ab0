"""The indices of one pass, drawn from the sampler when they are needed."""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain, count, islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from dpex.engine.index_source import IndexSource
from dpex.engine.samplers import SamplerStart, batches_of, each_of
from dpex.system.handlers import is_of_handler
from dpex.system.user_warnings import is_first, warn
from dpex.worker.decoded_stream import FailedRead

if TYPE_CHECKING:
    from dpex.schedule.schedule import Schedule

_CANNOT_TELL = "state_dict() of the sampler failed, so its state is not kept: a later run draws its order again"


class BegunDraws(NamedTuple):
    """An iterator of indices, its first index (already drawn), and the random states before the pass's first draw."""

    start: SamplerStart
    first: list[Any]
    source: Iterator[Any]

    @classmethod
    def of(cls, start: SamplerStart, source: Iterator[Any]) -> BegunDraws:
        """Draw the first index of ``source`` from the present random states."""
        return cls(start, list(islice(each_of(source), 1)), source)


class Draws(IndexSource):
    """See the module.

    Args:
        source: torch's unused iterator of ``index_sampler``.
        copies: True if the sampler may reuse the list of a batch, so that each index is copied.
        stateful: The sampler that has a ``state_dict()``, or None.
        every: Batches between two states of ``stateful``. The first state is taken after the first batch, because
            before that batch a sampler may still report the previous epoch.
        note: Called with a pair: the number of batches drawn, and the state of ``stateful`` after them.

    Attributes:
        start: The random states before the first draw; None until then.
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
        self.start: SamplerStart | None = None
        self._numbers = count()
        self._copies = copies
        self._index_sampler = index_sampler
        self._generator = generator
        self._is_stream = is_stream
        self._stateful = stateful
        self._every = every
        self._note = note
        self._source = source
        self._indices: Iterator[Any] | None = None
        self._due: float = 1

    def begin_at(self, first: int, begun: BegunDraws) -> None:
        """Draw from ``begun``, whose first index is the index of batch ``first``."""
        self._numbers, self._due, self.start = count(first), first + 1, begun.start
        self._indices = chain(begun.first, each_of(begun.source))

    def next_indices(self, schedule: Schedule, count: int) -> list[Any]:
        """Return the indices of the next ``count`` batches, or of all that are left.

        If the sampler raises an error, the last item is a `FailedRead` in place of an index.
        """
        drawn: deque[tuple[Any, int]] = deque()
        found: list[Any] = []
        at_once = count if not self._copies and self._stateful is None else 1
        while len(found) < count:
            drawn.clear()
            try:
                self.draw_into(drawn, at_once)
            except Exception as error:
                if is_of_handler(error):  # a signal handler raised it while the sampler was drawing
                    raise
                return [*found, *(index for index, _ in drawn), FailedRead(error)]
            if not drawn:
                self.is_over = True
                break
            found += [_as_drawn(index) if self._copies else index for index, _ in drawn]
        return found

    def draw_into(self, drawn: deque[tuple[Any, int]], most: int) -> None:
        """Append the indices of the next ``most`` batches, with their numbers.

        One call into C takes an index from the sampler and appends it, so an exception of a signal handler,
        which comes between two byte codes, loses no index.
        """
        if self._indices is None:
            sampler = self._index_sampler
            self.start = start = SamplerStart.now(sampler, self._generator, is_stream=self._is_stream)
            begun = BegunDraws.of(start, batches_of(sampler) or self._source)
            self._indices = chain(begun.first, each_of(begun.source))
        drawn.extend(zip(islice(self._indices, most), self._numbers, strict=False))
        if self._stateful is not None and drawn and drawn[-1][1] + 1 >= self._due:
            self._ask(drawn[-1][1] + 1)

    def _ask(self, drawn: int) -> None:
        self._due = drawn + self._every
        try:
            state = copy.deepcopy(self._stateful.state_dict())
        except Exception as error:
            self._due = math.inf
            if is_first(_CANNOT_TELL):
                warn(f"{_CANNOT_TELL}: {error!r}")
            return
        self._note((drawn, state))


def _as_drawn(index: Any) -> Any:
    """Return ``index``, or a copy if the sampler could change it, such as a list that it fills again for each batch."""
    if isinstance(index, torch.Tensor):
        return index.clone()
    return index.copy() if type(index) in (list, np.ndarray) else index
