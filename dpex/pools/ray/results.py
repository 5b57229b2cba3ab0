"""Answers of actors on their way from Ray's thread to the trainer's.

Large buffers come on connections of their own (see `stream`) or, from a worker that has none, in Ray's object store:
then Ray's callback thread copies them once, without the interpreter's lock, so that the store's memory is free at once.
Either way they land in memory of the trainer that stays faulted in (see `arena`), and the batches are ordinary writable
tensors. An answer that is complete goes on a list, and a byte into a pipe.
"""

from __future__ import annotations

import contextlib
import logging
import marshal
import os
import pickle
import threading
from collections import deque
from typing import Any, NamedTuple

import numpy as np

from dpex.pools.ray.cluster import Cluster
from dpex.pools.ray.tcp_stream import Receiver, StreamBrokenError, Target
from dpex.pools.ray.worker_actor import BATCH, END
from dpex.system.clock import monotonic
from dpex.transport.codec import Decoder
from dpex.worker.core import Failure, StreamEnd

logger = logging.getLogger("dpex")

Tag = tuple[int, int]
"""Host and call."""


class Landed(NamedTuple):
    """The results of one call; each is (epoch, number, kind, value, stages, cpu_s, encode_s, nbytes).

    at: when the last of it was here (`clock`). streamed: large buffers came on a connection of their own. queued_s: the
    worker was on a run queue while it made them; None: not known.
    """

    results: list[tuple[Any, ...]]
    snapshot: tuple[Any, ...] | None
    at: float
    streamed: bool
    queued_s: float | None = None


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
    """Owned by the trainer's thread, but for `_arrived` and what it calls: Ray's thread and the receiver's run that.

    ``address``: where workers can reach this process, or None if large buffers are to go through Ray's object store.
    """

    def __init__(self, cluster: Cluster, address: str | None) -> None:
        self.epoch = 0
        self._cluster = cluster
        self._answers: deque[tuple[Tag, Any]] = deque()
        self._lock = threading.Lock()
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        self._closed = False
        self._receiver: Receiver | None = None
        if address is not None:
            try:
                self._receiver = Receiver(address, self._memory)
            except OSError as error:
                logger.info("large batches travel through Ray's object store: cannot listen on %s: %s", address, error)

    @property
    def descriptor(self) -> int:
        """Readable when `take` has something."""
        return self._read

    def target(self, host: int) -> Target | None:
        """What a host must know to send large buffers straight here."""
        return None if self._receiver is None else self._receiver.target(host)

    def forget(self, host: int) -> None:
        """A host is no more."""
        if self._receiver is not None:
            self._receiver.forget(host)

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
        if self._receiver is not None:
            self._receiver.close()
        self._answers.clear()

    def _arrived(self, future: Any, tag: Tag, lands: bool) -> None:
        if self._closed:
            return
        try:
            answer = future.exception()
            if answer is None:
                answer = future.result()
                if lands:
                    self._land(answer, tag)
                    return
        except BaseException as error:
            answer = error
        self._answer(tag, answer)

    def _answer(self, tag: Tag, answer: Any) -> None:
        self._answers.append((tag, answer))
        self.wake()

    def _land(self, answer: Any, tag: Tag) -> None:
        """Answer when the buffers are here."""
        header, arrays = (answer, []) if isinstance(answer, bytes) else (answer[0], answer[1:])
        made, snapshot, frame, queued_s = marshal.loads(header)
        if frame is None or self._receiver is None:
            stale = all(result[0] != self.epoch for result in made)
            buffers = [] if stale else [self._copy(array) for array in arrays]
            self._landed(tag, made, snapshot, buffers, queued_s, streamed=False)
            return

        def here(buffers: list[Any] | None) -> None:
            if buffers is None:
                self._answer(tag, StreamBrokenError("the connection that carries its batches broke"))
            else:
                self._landed(tag, made, snapshot, buffers, queued_s, streamed=True)

        self._receiver.when_here(tag[0], frame, here)

    def _landed(
        self,
        tag: Tag,
        made: list[Any],
        snapshot: Any,
        buffers: list[Any],
        queued_s: float | None,
        *,
        streamed: bool,
    ) -> None:
        results = []
        for epoch, number, kind, node, stages, cpu_s, encode_s, nbytes, places in made:
            slots = {(segment, slot): buffers[which] for segment, slot, which in places} if buffers else {}
            value = Result(kind, node, slots)
            results.append((epoch, number, kind, value, stages, cpu_s, encode_s, nbytes))
        self._answer(tag, Landed(results, snapshot, monotonic(), streamed, queued_s))

    def _memory(self, nbytes: int) -> Any:
        with self._cluster.landing_lock:
            return self._cluster.landing.array(nbytes)[0]

    def _copy(self, source: Any) -> Any:
        target = self._memory(source.nbytes)
        np.copyto(target, source)
        return target
