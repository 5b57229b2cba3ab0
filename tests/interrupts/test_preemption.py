"""A scheduler preempts a job: its signal comes to every process, the training saves its state, a later run resumes."""

import multiprocessing
import os
import pickle
import signal
from multiprocessing.connection import Connection
from typing import Any

import pytest
from waiting import PATIENCE_S

from dpex import DpexDataLoader

SAMPLES, BATCH, BEFORE = 400, 4, 5


def train(conn: Connection, number: int, state: dict[str, Any]) -> None:
    """Train in a process group of its own until the signal has come; then send the samples so far, and the state."""
    os.setpgrp()
    came: list[int] = []
    signal.signal(number, lambda *_: came.append(number))
    loader = DpexDataLoader(list(range(SAMPLES)), batch_size=BATCH, num_workers=2)
    if state:
        loader.load_state_dict(state)
    got: list[int] = []
    for at, batch in enumerate(loader):
        got += batch.tolist()
        if at == BEFORE and not state:
            conn.send(os.getpid())
            conn.recv()
        if came:
            break
    conn.send((got, pickle.dumps(loader.state_dict())))


def run(number: int, state: dict[str, Any]) -> tuple[list[int], dict[str, Any]]:
    """Return what one run sent. The first one gets the signal after `BEFORE` batches, and so do its workers."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=train, args=(theirs, number, state))
    process.start()
    if not state:
        assert ours.poll(PATIENCE_S)
        os.killpg(ours.recv(), number)
        ours.send(None)
    assert ours.poll(PATIENCE_S)
    got, after = ours.recv()
    process.join(PATIENCE_S)
    assert process.exitcode == 0
    return got, pickle.loads(after)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_preempted_training_saves_and_resumes(number: int) -> None:
    got, state = run(number, {})
    assert got == list(range(len(got)))
    assert len(got) < SAMPLES
    rest, _ = run(number, state)
    assert got + rest == list(range(SAMPLES))
