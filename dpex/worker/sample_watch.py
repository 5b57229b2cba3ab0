"""Ends a worker process in which loading a sample takes too long, and reports its stack.

A thread of the worker looks a few times within the time that a sample may take. It counts its own looks, so that a
process that was stopped, or a machine that slept, is not taken for a sample that hangs. If a sample is still the same
after enough looks, the thread reports the sample's place and the stack of the thread that loads it. Then it ends the
process: nothing else ends code that does not return. Code that keeps the interpreter's lock also stops this thread.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

LOOKS = 4
"""Looks within the time that a sample may take. It may take one more at most."""
EXIT_CODE = 75
"""EX_TEMPFAIL of sysexits.h."""
_MOST_LETTERS = 4000
"""Characters of a stack that are reported: its innermost frames."""
_NONE = -1


class SampleWatch:
    """The thread that watches. ``tell`` is called with the sample's place in its batch, its index, and the stack.

    The thread that loads samples makes this object, and calls `begin` and `end`.
    """

    def __init__(self, timeout_s: float, tell: Callable[[int, Any, str], None]) -> None:
        self._timeout_s = timeout_s
        self._tell = tell
        self._loading = _NONE
        """The number of the sample that is being loaded, counted from the process's first."""
        self._begun = 0
        self._place = 0
        self._index: Any = None
        self._looks = LOOKS
        self._seen = _NONE
        self._times = 0
        self._is_ending = False
        self._thread_id = threading.get_ident()

    def start(self) -> None:
        """Start the thread."""
        threading.Thread(target=self._run, name="dpex-sample-watch", daemon=True).start()

    def begin(self, place: int, index: Any, samples: int = 1) -> None:
        """Note that a sample is being loaded, or ``samples`` at once."""
        self._place = place
        self._index = index
        self._looks = LOOKS * samples
        self._begun += 1
        self._loading = self._begun

    def end(self) -> None:
        """Note that the sample has been loaded, or has failed."""
        self._loading = _NONE
        while self._is_ending:
            time.sleep(0.001)  # the thread has just found that it took too long, and sends something

    def _run(self) -> None:
        while True:
            time.sleep(self._timeout_s / LOOKS)
            self.look()

    def look(self) -> None:
        """End the process if the same sample has been seen at too many looks."""
        loading = self._loading
        self._times = self._times + 1 if loading == self._seen != _NONE else 0
        self._seen = loading
        if self._times >= self._looks:
            self._end_process(loading)

    def _end_process(self, loading: int) -> None:
        self._is_ending = True
        if self._loading == loading:  # else it has ended meanwhile; after this, it cannot any more
            frame = sys._current_frames().get(self._thread_id)
            stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
            try:
                self._tell(self._place, self._index, stack[-_MOST_LETTERS:])
            finally:
                os._exit(EXIT_CODE)
        self._is_ending = False


of_process: SampleWatch | None = None
"""The watch of this process, if it is a worker with a limit."""


def begin_watch(timeout_s: float, tell: Callable[[int, Any, str], None]) -> None:
    """Watch the samples that the calling thread loads in this process."""
    global of_process
    of_process = SampleWatch(timeout_s, tell)
    of_process.start()
