"""Random states of samples that an event loop loads at the same time.

Coroutines take turns, so draws from the process's generators would depend on the order in which answers arrive.
`SampleStates` are the states of the generators as one sample has them. `Turns` exchanges them between two samples, for
14 µs. They are seeded by the seed of the batch and the place of the sample. So a batch depends neither on the order of
answers nor on the worker, also where a sample draws after it has waited.

The generators are the global ones and those that lie in the dataset. NumPy's bit generator is exchanged by reference.
Exchanging it loses the second number of a pair of normal numbers. Where NumPy was drawn from, its whole state is kept.
"""

from __future__ import annotations

import ctypes
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dpex.worker.batch_seeding import seed_ticket

if TYPE_CHECKING:
    from dpex.worker.own_generators import OwnGenerators

_POSITION = 624 * 4
"""Bytes in NumPy's ``mt19937_state`` before the position of the next word: its words."""
_numpy: Any = np.random


class _Words:
    """A cheap look at whether a bit generator of NumPy was drawn from."""

    __slots__ = ("_first", "_position", "generator")

    def __init__(self, generator: Any) -> None:
        self.generator = generator
        address = generator.ctypes.state_address
        self._first = ctypes.c_uint32.from_address(address)
        self._position = ctypes.c_int.from_address(address + _POSITION)

    def mark(self) -> tuple[int, int]:
        return self._position.value, self._first.value


class SampleStates:
    """The states of the generators as one sample has them, ``own`` generators of the dataset among them.

    ``is_over``: the sample is loaded. A task of its own that lives on has no states any more.
    """

    __slots__ = ("_mark", "_numpy", "_own", "_own_states", "_python", "_torch", "_words", "is_over", "seed")

    def __init__(self, seed: int, own: OwnGenerators | None) -> None:
        self.seed: int = seed
        self.is_over: bool = False
        self._own = own
        self._words: _Words | None = None
        self._numpy: Any = None
        self._own_states: dict[str, Any] = {}

    def put_in_place(self, spare: list[_Words]) -> None:
        """Set the generators to these states. A sample that has none yet takes a bit generator of ``spare``."""
        if self._words is None:
            self._words = spare.pop() if spare else _Words(np.random.MT19937(0))
            _numpy.set_bit_generator(self._words.generator)
            seed_ticket(self.seed)
            if self._own:
                self._own.seed(self.seed)
        else:
            random.setstate(self._python)
            torch.default_generator.set_state(self._torch)
            _numpy.set_bit_generator(self._words.generator)
            if self._numpy is not None:
                _numpy.set_state(self._numpy)
            if self._own:
                self._own.restore(self._own_states)
        self._mark = self._words.mark()

    def keep(self) -> None:
        """Keep the present states of the generators, before another sample has them."""
        assert self._words is not None
        self._python = random.getstate()
        self._torch = torch.default_generator.get_state()
        if self._numpy is not None or self._words.mark() != self._mark:
            self._numpy = _numpy.get_state(legacy=False)
        if self._own:
            self._own_states = self._own.states()

    def end(self, spare: list[_Words]) -> None:
        """Give the bit generator back to ``spare``."""
        self.is_over = True
        if self._words is not None:
            spare.append(self._words)
            self._words = None


class Turns:
    """Exchanges the states of the process's generators between samples. Used by the thread that runs the loop.

    Attributes:
        holder: The states that are in place; None: those of the process.
    """

    def __init__(self) -> None:
        self.holder: SampleStates | None = None
        self._spare: list[_Words] = []
        self._own: Any = None
        """The bit generator that the process has while samples wait."""
        self._words: _Words | None = None
        """The bit generator that `mark` saw."""
        self._marks: Any = None

    def enter(self, states: SampleStates | None) -> None:
        """Put the states of a sample in place, before a step of it; None: those of the process."""
        self.leave()
        if states is not None and not states.is_over:
            self.holder = states
            states.put_in_place(self._spare)

    def leave(self) -> None:
        """Keep the states of the sample that has the generators, as other code draws now."""
        holder, self.holder = self.holder, None
        if holder is not None:
            holder.keep()
            self._give_to_process()

    def over(self, states: SampleStates) -> None:
        """End the states of a sample that is loaded."""
        if self.holder is states:
            self.holder = None
            self._give_to_process()
        states.end(self._spare)

    def _give_to_process(self) -> None:
        """Give NumPy the process's bit generator: what is seeded next must not be that of a sample that waits."""
        if self._own is None:
            self._own = np.random.MT19937(0)
        _numpy.set_bit_generator(self._own)

    # -- have samples drawn? -------------------------------------------------------------------------------------------

    def mark(self, seed: int) -> None:
        """Seed the generators, and note their states, from which `drew` shows that a sample has drawn.

        Seeding also drops the second normal number of a pair: taking it would change nothing that `drew` looks at.
        """
        seed_ticket(seed)
        self._marks = self._now()

    def drew(self) -> bool:
        """Return True if a generator was drawn from since `mark`."""
        return bool(self._marks != self._now())

    def _now(self) -> tuple[Any, ...]:
        """Return a value that changes when a global generator is drawn from, in 9 µs."""
        generator = _numpy.get_bit_generator()
        if self._words is None or self._words.generator is not generator:
            self._words = _Words(generator)
        return random.getstate(), self._words.mark(), torch.default_generator.get_state().numpy().tobytes()


turns: Turns = Turns()
