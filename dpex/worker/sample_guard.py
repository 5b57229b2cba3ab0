"""Load the samples of a batch one by one, report samples that fail, and count the reports.

A batch stays full. Under "skip" another sample of the same batch replaces a sample that fails, and is then in the batch
twice. Under "replace" a random sample of the dataset replaces it, chosen by a function of the base seed, the batch and
the failed index. So neither the number of batches nor their order depends on failures, ranks stay in step, and any
worker makes the same batch. If all samples of a batch fail, "skip" works like "replace".
"""

from __future__ import annotations

import itertools
import logging
import operator
import os
import random
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from types import FrameType
from typing import Any

from dpex.errors import TooManySampleErrors
from dpex.measure.readable import fine_percent
from dpex.measure.reading import FAILED_KEPT
from dpex.measure.sampling import FailedSample, as_text
from dpex.schedule.events import Instruction, Notice, Raise
from dpex.schedule.sample_policy import ALL_AT_ONCE, AS_TORCH, LeavingOut, SamplePolicy

logger: logging.Logger = logging.getLogger("dpex")
TRIES = 8
"""Samples of the dataset that are tried in place of a failed one."""
_MOST_LETTERS = 200
"""Characters of an error's text that are kept."""
LOOKS = 4
"""Number of looks at the present sample per time limit. The limit is exceeded by at most one interval between looks."""
EXIT_CODE = 75
"""Exit code of a worker process in which a sample took too long: EX_TEMPFAIL of sysexits.h."""
_MOST_STACK_LETTERS = 4000
"""Characters of the innermost frames of a stack that are reported."""
_NONE = -1
LEAST = 10
"""Number of failed samples that never ends a pass, because a share says little after only a few batches."""
_PLACE = {"skip": "another one of its batch has its place", "replace": "another one of the dataset has its place"}


class HangsError(Exception):
    """Loading the sample hung in several workers."""


class SampleGuard:
    """Loads the samples of a map-style dataset for one worker. ``seed``: chooses replacements of failed samples."""

    def __init__(self, dataset: Any, policy: SamplePolicy, seed: int) -> None:
        self._dataset = dataset
        self.policy: SamplePolicy = policy
        self._seed = seed
        self._watch = watch_of_process
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
        left_out, wanted = apart(index)
        if self._in_bulk is not None and not left_out:
            data = self._bulk(wanted)
            if data is not None:
                return data
        return self._one_by_one(list(wanted), left_out)

    def sample(self, index: Any) -> Any:
        left_out, wanted = apart(index)
        return self._one_by_one([wanted], left_out)[0]

    def _bulk(self, wanted: Any) -> Any:
        """Return all samples, loaded by one call, or None if it fails. The caller then loads each sample alone, to find
        the failing sample."""
        if self._watch is not None:
            self._watch.begin(ALL_AT_ONCE, wanted, len(wanted))
        try:
            assert self._in_bulk is not None
            return self._in_bulk(wanted)
        except Exception:
            if not self.policy.tolerates:
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
                    raise HangsError(left_out[place])
                data.append(self._load(each, place))
            except Exception as error:
                if not self.policy.tolerates:
                    raise
                self._failed.append(self.described(each, error))
                errors[place] = error
                data.append(None)
        for place, candidates in self.filling(data, wanted, errors).items():
            data[place] = self._another(candidates, place, errors[place])
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

    def described(self, index: Any, error: Exception) -> tuple[str, str]:
        """Return index and error of a sample that failed, as text."""
        what = str(error) if isinstance(error, HangsError) else f"{type(error).__name__}: {error}"
        return as_text(index), what[:_MOST_LETTERS]

    # -- replacements ----------------------------------------------------------------------------------------------

    def filling(self, data: list[Any], wanted: Sequence[Any], errors: Collection[int]) -> dict[int, Iterator[int]]:
        """Under "skip", replace samples that failed by good samples of the batch.

        Return the positions that still need a sample of the dataset, each with the indices to try.
        """
        good = [place for place in range(len(data)) if place not in errors]
        others: dict[int, Iterator[int]] = {}
        for place in errors:
            if self.policy.on_error == "skip" and good:
                data[place] = data[min(good, key=lambda other: (other - place) % len(data))]
            else:
                others[place] = self._candidates(wanted, place)
        return others

    def _candidates(self, wanted: Sequence[Any], place: int) -> Iterator[int]:
        size = self._size(wanted[place])
        for attempt in range(TRIES if size else 0):
            yield random.Random(f"{self._seed}/{wanted[0]!r}/{wanted[place]!r}/{place}/{attempt}").randrange(size)

    def _another(self, candidates: Iterator[int], place: int, error: Exception) -> Any:
        """Return the first of the candidates that loads; raise ``error`` if none does."""
        for drawn in candidates:
            try:
                return self._load(drawn, place)
            except Exception as another:
                self._failed.append(self.described(drawn, another))
        raise error

    def _size(self, index: Any) -> int:
        """Return the length of the dataset; 0 if its indices are not whole numbers or it has no length."""
        try:
            operator.index(index)
            return len(self._dataset)
        except TypeError:
            return 0


def apart(index: Any) -> tuple[Any, Any]:
    """Return the places to leave out with their reasons, and the index itself."""
    return (index.places, index.index) if isinstance(index, LeavingOut) else ({}, index)


# -- samples that hang -------------------------------------------------------------------------------------------------


class SampleWatch:
    """Ends a worker process in which loading a sample takes too long, and reports its stack.

    A thread of the worker checks the present sample several times within the time limit. It counts its own checks, so
    that it does not mistake a stopped process or a suspended machine for a hanging sample. After enough checks of the
    same sample, the thread reports the sample's place in its batch, its index, and the stack of the thread that loads
    it. Then it ends the process, because nothing else ends code that does not return. Code that holds the GIL also
    stops this thread.

    The thread that loads samples makes this object, and calls `begin` and `end`.
    """

    def __init__(self, timeout_s: float, tell: Callable[[int, Any, str], None]) -> None:
        self._timeout_s = timeout_s
        self._tell = tell
        self._loading = _NONE
        """The number of the sample that is being loaded, counted from the process's start; `_NONE` between samples."""
        self._begun = 0
        self._place = 0
        self._index: Any = None
        self._looks = LOOKS
        self._seen = _NONE
        self._times = 0
        self._is_ending = False
        self._thread_id = threading.get_ident()

    def begin(self, place: int, index: Any, samples: int = 1) -> None:
        """Note that a sample begins to load, or ``samples`` samples at once."""
        self._place = place
        self._index = index
        self._looks = LOOKS * samples
        self._begun += 1
        self._loading = self._begun

    def begin_again(self) -> None:
        """Restart the time limit of the sample that is being loaded, if there is one."""
        if self._loading != _NONE:
            self.begin(self._place, self._index, self._looks // LOOKS)

    def end(self) -> None:
        self._loading = _NONE
        while self._is_ending:
            time.sleep(0.001)  # the watching thread may be about to report this sample and end the process

    def run(self) -> None:
        """Call `look` in an endless loop. This is the body of the watching thread."""
        while True:
            time.sleep(self._timeout_s / LOOKS)
            self.look()

    def look(self) -> None:
        """End the process if the same sample was being loaded at too many looks in a row."""
        loading = self._loading
        self._times = self._times + 1 if loading == self._seen != _NONE else 0
        self._seen = loading
        if self._times >= self._looks:
            self._end_process(loading)

    def _end_process(self, loading: int) -> None:
        self._is_ending = True
        if self._loading == loading:  # the sample has not ended meanwhile, and `end` now waits
            frame = sys._current_frames().get(self._thread_id)
            stack = _stack_of_dataset(frame) if frame is not None else ""
            try:
                self._tell(self._place, self._index, stack)
            finally:
                os._exit(EXIT_CODE)
        self._is_ending = False


_CALLERS = {SampleGuard._get.__code__, SampleGuard._bulk.__code__}


def _stack_of_dataset(frame: FrameType) -> str:
    """Return the stack from the dataset's frame to the innermost frame; of a long stack, only the innermost frames."""
    frames = list(itertools.takewhile(lambda each: each[0].f_code not in _CALLERS, traceback.walk_stack(frame)))
    lines = traceback.StackSummary.extract(reversed(frames)).format()
    while sum(map(len, lines)) > _MOST_STACK_LETTERS and len(lines) > 1:
        del lines[0]
    return "".join(lines)


watch_of_process: SampleWatch | None = None
"""The watch of this process, if it is a worker with a time limit for samples."""


def begin_watch(timeout_s: float, tell: Callable[[int, Any, str], None]) -> None:
    """Watch the samples that the calling thread loads in this process."""
    global watch_of_process
    watch_of_process = SampleWatch(timeout_s, tell)
    threading.Thread(target=watch_of_process.run, name="dpex-sample-watch", daemon=True).start()


# -- counting ----------------------------------------------------------------------------------------------------------


class SampleErrors:
    """Counts the samples that could not be loaded, names them, and ends the pass if they are too many.

    The thread that receives batches updates it, and any thread may read it. Warnings and errors are returned as
    instructions, which the training thread performs. ``count``: failed samples. ``latest``: the last `FAILED_KEPT`.
    """

    def __init__(self, policy: SamplePolicy) -> None:
        self.is_on: bool = policy.tolerates
        self.count: int = 0
        self.latest: deque[FailedSample] = deque(maxlen=FAILED_KEPT)
        self._policy = policy
        self._samples = 0
        self._last = (-1, -1)

    def made(
        self, batch: tuple[int, int], samples: int, failed: tuple[tuple[str, str], ...]
    ) -> tuple[Instruction, ...]:
        """Count ``batch`` (epoch, number) of ``samples`` samples. A second call in a row for it changes nothing."""
        if batch == self._last:
            return ()
        self._last = batch
        self._samples += samples
        said = [text for index, error in failed if (text := self._note(index, error))]
        if failed and self.count > max(LEAST, self._policy.max_errors * self._samples):
            return (*map(Notice, said), Raise(TooManySampleErrors(self._why())))
        return tuple(map(Notice, said))

    def _why(self) -> str:
        share, latest = self._policy.max_errors, self.latest[-1]
        return (
            f"{self.count} of {self._samples} samples could not be loaded, and SamplePolicy(max_errors={share}) allows "
            f"{fine_percent(share)} of them; the latest: sample {latest.shown} ({latest.error}). Mend the data, or "
            "allow more"
        )

    def _note(self, index: str, error: str) -> str:
        """Count a sample that failed. Return a text for the user if it is the first one, else ""."""
        text = (
            f"sample {index} could not be loaded ({error}): {_PLACE[self._policy.on_error]}, as SamplePolicy("
            f"on_error={self._policy.on_error!r}) says"
        )
        self.latest.append(FailedSample(index, error))
        self.count += 1
        if self.count == 1:
            return f"{text}. Further ones are logged, counted and named in the diagnosis"
        logger.warning("%s", text)
        return ""


NO_ERRORS = SampleErrors(AS_TORCH)
"""The `SampleErrors` of loaders whose batches raise the errors of their samples."""
