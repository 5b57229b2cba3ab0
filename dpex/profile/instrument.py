"""Where a dataset's time goes, step by step, without a change to it.

`Profile.of` gives a dataset and a collate function to be used in place of those given. They call those given, which
stay as they are, while steps are timed as in a loader that runs: `dpex.profile.discover` finds them, and
`dpex.profile.call_timer` hears when they are called. Random numbers are drawn as without it, and what the timing itself
takes is in none of the times.

A `Profile` belongs to one thread at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from math import inf
from typing import Any

from torch.utils.data import Dataset, IterableDataset, default_collate

from dpex.measure.sampling import LongestOf, Reservoir
from dpex.profile.call_timer import StepWatch
from dpex.profile.discover import add_steps, label
from dpex.profile.spans import SlowSample, Spans

COLLATE = "collate"
_SAMPLE = (".__getitem__", ".__iter__")
"""How the names of steps end that make one sample."""


class Profile:
    """A dataset and a collate function whose steps are timed, without a change to those given.

    It is picklable where those are, without what was timed.

    Attributes:
        dataset: To be used in place of the dataset given; its attributes are that one's.
        collate_fn: To be used in place of the collate function given.
        is_on: Whether calls are timed from now on.

    Examples:
        >>> import torch
        >>> from torch.utils.data import TensorDataset
        >>> from dpex import Profile
        >>> profile = Profile.of(TensorDataset(torch.arange(8)))
        >>> batch = profile.collate_fn([profile.dataset[index] for index in range(4)])
        >>> [(step.path, step.calls) for step in profile.spans().steps]
        [(('TensorDataset.__getitem__',), 4), (('collate',), 1)]
    """

    def __init__(
        self, dataset: Any, collate_fn: Callable[[Any], Any], cpu: Callable[[], float], wall: Callable[[], float]
    ) -> None:
        self._given = dataset, collate_fn, cpu, wall
        self._book: _SampleBook | None = None
        self.is_on = True
        self.dataset: Any = (_TimedStream if isinstance(dataset, IterableDataset) else _TimedDataset)(self, dataset)
        self.collate_fn: Any = _TimedCollate(self, collate_fn)

    @classmethod
    def of(
        cls,
        dataset: Any,
        collate_fn: Callable[[Any], Any] = default_collate,
        cpu: Callable[[], float] = time.thread_time,
        wall: Callable[[], float] = time.perf_counter,
    ) -> Profile:
        """Make a timed view of a dataset, map-style or iterable, and of a collate function.

        Args:
            dataset: What is to be timed; it stays as it is.
            collate_fn: What puts samples together.
            cpu: The CPU clock that steps are timed by; ``time.process_time`` counts threads of libraries as well.
            wall: The other clock.
        """
        return cls(dataset, collate_fn, cpu, wall)

    def __reduce__(self) -> tuple[Any, ...]:
        return Profile, self._given

    def spans(self) -> Spans:
        """Return what was timed so far."""
        return Spans() if self._book is None else self._book.spans()

    def timed(self, name: str, function: Callable[[Any], Any], argument: Any, indices: Sequence[Any]) -> Any:
        """Return what the function returns; a step of that name, which makes the samples of these indices."""
        if not self.is_on:
            return function(argument)
        if self._book is None:
            dataset, _, cpu, wall = self._given
            self._book = _SampleBook(dataset, cpu, wall)
        return self._book.timed(name, function, argument, indices)


class _SampleBook(StepWatch):
    """Times the calls of a profile, and tells apart the samples in them."""

    def __init__(self, dataset: Any, cpu: Callable[[], float], wall: Callable[[], float]) -> None:
        super().__init__(cpu=cpu, wall=wall, most_events=inf)
        add_steps(dataset, self)
        self._samples = 0
        self._slowest: LongestOf[SlowSample] = LongestOf()
        self._walls_s = Reservoir()
        self._times: list[tuple[float, float]] = []
        self._whole = 0.0, 0.0

    def timed(self, name: str, function: Callable[[Any], Any], argument: Any, indices: Sequence[Any]) -> Any:
        """See `Profile.timed`."""
        if self._open:  # within another timed call
            return self.call(name, function, argument)
        self._times.clear()
        is_told = self.start()
        try:
            made = self.call(name, function, argument)
        finally:
            if is_told:
                self.pause()
        for index, (wall_s, cpu_s) in zip(indices, self._parts(len(indices)), strict=True):
            self._count(SlowSample(index=index, wall_s=wall_s, cpu_s=cpu_s))
        return made

    def spans(self) -> Spans:
        """What was timed so far."""
        return Spans(
            samples=self._samples,
            steps=self.steps,
            slowest=self._slowest.found(),
            sample_walls_s=tuple(self._walls_s.kept),
        )

    def _was_booked(self, label: str, wall_s: float, cpu_s: float) -> None:
        if label.endswith(_SAMPLE) and not any(call.label.endswith(_SAMPLE) for call in self._open):
            self._times.append((wall_s, cpu_s))
        if not self._open:
            self._whole = wall_s, cpu_s

    def _parts(self, samples: int) -> Sequence[tuple[float, float]]:
        """The times of single samples; where they are made all at once, each is an equal part."""
        if len(self._times) == samples:
            return self._times
        wall_s, cpu_s = self._whole
        return [(wall_s / samples, cpu_s / samples)] * samples

    def _count(self, sample: SlowSample) -> None:
        self._samples += 1
        if self._samples == self._walls_s.due:
            self._walls_s.keep(sample.wall_s)
        if sample.wall_s > self._slowest.least_s:
            self._slowest.add(sample)


# -- in place of what was given ----------------------------------------------------------------------------------------


class _View:
    """Has the attributes of what it stands for."""

    def __init__(self, profile: Profile, given: Any) -> None:
        self._dpex = profile, given

    def __getattr__(self, name: str) -> Any:
        if name == "_dpex" or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(name)
        return getattr(self._dpex[1], name)


class _TimedDataset(_View, Dataset[Any]):
    def __getitem__(self, index: Any) -> Any:
        profile, dataset = self._dpex
        return profile.timed(f"{label(dataset)}.__getitem__", dataset.__getitem__, index, (index,))

    def __len__(self) -> int:
        return len(self._dpex[1])

    def __getattr__(self, name: str) -> Any:
        if name == "__getitems__" and callable(getattr(self._dpex[1], name, None)):
            return self._batch
        return super().__getattr__(name)

    def _batch(self, indices: Any) -> Any:
        profile, dataset = self._dpex
        return profile.timed(f"{label(dataset)}.__getitems__", dataset.__getitems__, indices, list(indices))


class _TimedStream(_View, IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        profile, dataset = self._dpex
        stream, name = iter(dataset), f"{label(dataset)}.__iter__"
        for number in count():
            try:
                sample = profile.timed(name, next, stream, (number,))
            except StopIteration:
                return
            yield sample

    def __len__(self) -> int:
        return len(self._dpex[1])


class _TimedCollate(_View):
    def __call__(self, samples: Any) -> Any:
        profile, collate_fn = self._dpex
        return profile.timed(COLLATE, collate_fn, samples, ())
