"""Errors that come out of ``next()``: which of them come in place of a batch, and how they are counted."""

from __future__ import annotations

from collections import Counter
from typing import Any

from dpex.errors import SampleTimeoutError, WorkerDiedError
from dpex.worker.outcome import Failure
from dpex.worker.raw_samples import FailedRead

_OF_WORKERS = (WorkerDiedError, SampleTimeoutError)
ERRORS = (Failure, FailedRead, *_OF_WORKERS)
"""What stands in place of a batch that could not be made."""


def raise_from(hand: list[Any], errors: Counter[str]) -> None:
    """Take the error that ``hand`` holds out of it, count it if it is the batch's own, and raise it."""
    value = hand[0]
    del hand[:]
    if isinstance(value, _OF_WORKERS):
        raise value
    errors["batch"] += 1
    if isinstance(value, FailedRead):
        raise value.error
    value.wrapper.reraise()


def count_death(error: Exception, errors: Counter[str]) -> None:
    """Count an error if it says that workers were lost."""
    if isinstance(error, _OF_WORKERS):
        errors["worker"] += 1
