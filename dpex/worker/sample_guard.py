"""Gets the samples of a batch one by one, also where some cannot be had, and says which these were.

A batch stays full: the place of a sample that fails is taken by another sample of the same batch ("skip"), which is
then there twice, or by another sample of the dataset ("replace"), which is drawn by a number made of the seed, the
index that failed and its batch. So neither the number of batches nor their order depends on what fails, ranks stay in
step, and any worker makes the same of it. Where all samples of a batch fail, "skip" does as "replace".
"""

from __future__ import annotations

import operator
import random
from collections.abc import Sequence
from typing import Any

from dpex.measure.sampling import as_text
from dpex.schedule.sample_policy import ALL_AT_ONCE, LeavingOut, SamplePolicy
from dpex.worker import sample_watch

TRIES = 8
"""Samples of the dataset that are tried in place of one that failed."""
_MOST_LETTERS = 200
"""Of an error's text."""


class _HangsError(Exception):
    """Loading the sample did not end, in several workers."""


class SampleGuard:
    """See the module.

    Args:
        dataset: A map-style dataset.
        policy: What is to be done.
        seed: That of the iterator, for the samples that take the place of others.
    """

    def __init__(self, dataset: Any, policy: SamplePolicy, seed: int) -> None:
        self._dataset = dataset
        self._policy = policy
        self._seed = seed
        self._watch = sample_watch.of_process
        self._in_bulk = getattr(dataset, "__getitems__", None)
        self._failed: list[tuple[str, str]] = []

    def taken(self) -> tuple[tuple[str, str], ...]:
        """Index and error of the samples that failed since the last call."""
        if not self._failed:
            return ()
        failed, self._failed = tuple(self._failed), []
        return failed

    def samples(self, index: Any) -> Any:
        """The samples of a batch; a list, unless the dataset returns something else for all of them."""
        left_out, wanted = _apart(index)
        if self._in_bulk is not None and not left_out:
            data = self._bulk(wanted)
            if data is not None:
                return data
        return self._one_by_one(list(wanted), left_out)

    def sample(self, index: Any) -> Any:
        """A sample that is a batch by itself."""
        left_out, wanted = _apart(index)
        return self._one_by_one([wanted], left_out)[0]

    def _bulk(self, wanted: Any) -> Any:
        """All at once; None if that fails, so that it is to be seen which of them does."""
        if self._watch is not None:
            self._watch.begin(ALL_AT_ONCE, wanted, len(wanted))
        try:
            assert self._in_bulk is not None
            return self._in_bulk(wanted)
        except Exception:
            if not self._policy.tolerates:
                raise
            return None
        finally:
            if self._watch is not None:
                self._watch.end()

    def _one_by_one(self, wanted: Sequence[Any], left_out: Any) -> list[Any]:
        data: list[Any] = []
        errors: dict[int, Exception] = {}
        for place, each in enumerate(wanted):
            try:
                if place in left_out:
                    raise _HangsError(left_out[place])
                data.append(self._load(each, place))
            except Exception as error:
                if not self._policy.tolerates:
                    raise
                self._note(each, error)
                errors[place] = error
                data.append(None)
        if errors:
            self._fill(data, wanted, errors)
        return data

    def _load(self, index: Any, place: int) -> Any:
        watch = self._watch
        if watch is None:
            return self._get(index)
        watch.begin(place, index)
        try:
            return self._get(index)
        finally:
            watch.end()

    def _get(self, index: Any) -> Any:
        return self._dataset[index] if self._in_bulk is None else self._in_bulk([index])[0]

    def _note(self, index: Any, error: Exception) -> None:
        what = str(error) if isinstance(error, _HangsError) else f"{type(error).__name__}: {error}"
        self._failed.append((as_text(index), what[:_MOST_LETTERS]))

    # -- what takes their places -----------------------------------------------------------------------------------

    def _fill(self, data: list[Any], wanted: Sequence[Any], errors: dict[int, Exception]) -> None:
        good = [place for place in range(len(data)) if place not in errors]
        for place, error in errors.items():
            if self._policy.on_error == "skip" and good:
                data[place] = data[min(good, key=lambda other: (other - place) % len(data))]
            else:
                data[place] = self._another(wanted, place, error)

    def _another(self, wanted: Sequence[Any], place: int, error: Exception) -> Any:
        """Another sample of the dataset. Raises the error of the sample if there is none."""
        size = self._size(wanted[place])
        for attempt in range(TRIES if size else 0):
            drawn = random.Random(f"{self._seed}/{wanted[0]!r}/{wanted[place]!r}/{place}/{attempt}").randrange(size)
            try:
                return self._load(drawn, place)
            except Exception as another:
                self._note(drawn, another)
        raise error

    def _size(self, index: Any) -> int:
        """How many samples there are, where they have whole numbers; 0: nothing can be drawn."""
        try:
            operator.index(index)
            return len(self._dataset)
        except TypeError:
            return 0


def _apart(index: Any) -> tuple[Any, Any]:
    """Which places are to be left out, and why; and the index itself."""
    return (index.places, index.index) if isinstance(index, LeavingOut) else ({}, index)
