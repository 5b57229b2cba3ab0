"""Answers of actors on their way from Ray's thread to the trainer's.

Ray's callback thread copies large buffers out of the object store once, into memory of the trainer that stays faulted
in (see `arena`), so that the batches are ordinary writable tensors and the store's memory is free at once. The copy
runs without the interpreter's lock. Then the answer goes on a list, and a byte into a pipe.
"""

from __future__ import annotations

import contextlib
import marshal
import os
import pickle
import threading
from collections import deque
from typing import Any, NamedTuple

import numpy as np

from dpex.lanes.cluster import Cluster
from dpex.lanes.remoteworker import BATCH, END
from dpex.transport.codec import Decoder
from dpex.worker import Failure, StreamEnd

Tag = tuple[int, int]
"""Host and call."""


class Landed(NamedTuple):
    """The results of one call; each is (epoch, number, kind, value, fetch_s, collate_s, cpu_s, encode_s, nbytes)."""

    results: list[tuple[Any, ...]]
    snapshot: tuple[Any, ...] | None


class Result:
    """An undecoded result; calling it decodes."""

    __slots__ = ("_kind", "_node", "_slots")

    def __init__(self, kind: int, node: Any, slots: dict[tuple[int, int], Any]) -> None:
        self._kind, self._node, self._slots = kind, node, slots

    def __call__(self) -> Any:
        if self._kind == BATCH:
            return Decoder(self._lease).decode(self._node)
        return StreamEnd() if self._kind == END else Failure(pickle.loads(self._node))

    def _lease(self, segment: int, slot: int, nbytes: int) -> Any:
        return self._slots[segment, slot][:nbytes]


class Inbox:
    """Owned by the trainer's thread, but for `_arrived`, which Ray's thread runs."""

    def __init__(self, cluster: Cluster) -> None:
        self.epoch = 0
        self._cluster = cluster
        self._answers: deque[tuple[Tag, Any]] = deque()
        self._lock = threading.Lock()
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        self._closed = False

    @property
    def descriptor(self) -> int:
        """Readable when `take` has something."""
        return self._read

    def expect(self, ref: Any, tag: Tag, lands: bool) -> None:
        """The answer of the call behind Ray's ``ref`` is wanted; with ``lands`` it holds results."""

        def arrived(future: Any) -> None:
            self._arrived(future, tag, lands)

        ref.future().add_done_callback(arrived)

    def take(self) -> list[tuple[Tag, Any]]:
        """Answers since the last call: what the actor returned, `Landed` results, or an exception."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._read, 4096)
        answers = []
        while self._answers:
            answers.append(self._answers.popleft())
        return answers

    def wake(self) -> None:
        """Make the descriptor readable."""
        with self._lock:
            if not self._closed:
                with contextlib.suppress(BlockingIOError):
                    os.write(self._write, b"\0")

    def close(self) -> None:
        """Later answers are dropped."""
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self._read)
                os.close(self._write)
        self._answers.clear()

    def _arrived(self, future: Any, tag: Tag, lands: bool) -> None:
        if self._closed:
            return
        try:
            answer = future.exception()
            if answer is None:
                answer = self._land(future.result()) if lands else future.result()
        except BaseException as error:
            answer = error
        self._answers.append((tag, answer))
        self.wake()

    def _land(self, answer: Any) -> Landed:
        header, arrays = (answer, ()) if isinstance(answer, bytes) else (answer[0], answer[1:])
        made, snapshot = marshal.loads(header)
        results = []
        for epoch, number, kind, node, fetch_s, collate_s, cpu_s, encode_s, nbytes, places in made:
            slots = {}
            if places and epoch == self.epoch:
                slots = {(segment, slot): self._copy(arrays[which]) for segment, slot, which in places}
            value = Result(kind, node, slots)
            results.append((epoch, number, kind, value, fetch_s, collate_s, cpu_s, encode_s, nbytes))
        return Landed(results, snapshot)

    def _copy(self, source: Any) -> Any:
        with self._cluster.landing_lock:
            target, _ = self._cluster.landing.array(source.nbytes)
        np.copyto(target, source)
        return target
