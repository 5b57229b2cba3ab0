"""Loads the samples of a batch one by one, also where some fail, and reports those.

A batch stays full. Under "skip" the place of a sample that fails is taken by another sample of the same batch, which is
then in it twice. Under "replace" it is taken by another sample of the dataset, drawn by a number made of the seed, the
index that failed and its batch. So neither the number of batches nor their order depends on failures, ranks stay in
step, and any worker makes the same batch. If all samples of a batch fail, "skip" works like "replace".
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
"""Samples of the dataset that are tried in place of a failed one."""
_MOST_LETTERS = 200
"""Characters of an error's text that are kept."""


class _HangsError(Exception):
    """Loading the sample hung in several workers."""


class SampleGuard:
    """Loads the samples of one worker.

    Args:
        dataset: A map-style dataset.
        policy: The treatment of samples that fail.
        seed: The iterator's seed, for the samples that take the place of others.
    """

    def __init__(self, dataset: Any, policy: SamplePolicy, seed: int) -> None:
        self._dataset = dataset
        self._policy = policy
        self._seed = seed
        self._watch = sample_watch.of_process
        self._in_bulk = getattr(dataset, "__getitems__", None)
        self._failed: list[tuple[str, str]] = []

    def taken(self) -> tuple[tuple[str, str], ...]:
        """Return index and error of the samples that failed since the last call."""
        if not self._failed:
            return ()
        failed, self._failed = tuple(self._failed), []
        return failed

    def samples(self, index: Any) -> Any:
        """Return the samples of a batch: a list, or the value that the dataset returned for all of them."""
        left_out, wanted = _apart(index)
        if self._in_bulk is not None and not left_out:
            data = self._bulk(wanted)
            if data is not None:
                return data
        return self._one_by_one(list(wanted), left_out)

    def sample(self, index: Any) -> Any:
        """Return a sample that is a batch by itself."""
        left_out, wanted = _apart(index)
        return self._one_by_one([wanted], left_out)[0]

    def _bulk(self, wanted: Any) -> Any:
        """Return all at once, or None if that fails: then each is loaded alone, to find the failing one."""
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

    # -- replacements ----------------------------------------------------------------------------------------------

    def _fill(self, data: list[Any], wanted: Sequence[Any], errors: dict[int, Exception]) -> None:
        good = [place for place in range(len(data)) if place not in errors]
        for place, error in errors.items():
            if self._policy.on_error == "skip" and good:
                data[place] = data[min(good, key=lambda other: (other - place) % len(data))]
            else:
                data[place] = self._another(wanted, place, error)

    def _another(self, wanted: Sequence[Any], place: int, error: Exception) -> Any:
        """Return another sample of the dataset, or raise the error of the sample if all that are tried fail."""
        size = self._size(wanted[place])
        for attempt in range(TRIES if size else 0):
            drawn = random.Random(f"{self._seed}/{wanted[0]!r}/{wanted[place]!r}/{place}/{attempt}").randrange(size)
            try:
                return self._load(drawn, place)
            except Exception as another:
                self._note(drawn, another)
        raise error

    def _size(self, index: Any) -> int:
        """Return the length of a dataset whose indices are whole numbers; 0 of any other."""
        try:
            operator.index(index)
            return len(self._dataset)
        except TypeError:
            return 0


def _apart(index: Any) -> tuple[Any, Any]:
    """Return the places to leave out with their reasons, and the index itself."""
    return (index.places, index.index) if isinstance(index, LeavingOut) else ({}, index)
