"""Objects in place of a batch: the end of a stream, or an error. Apart from a worker's code, which they do not need."""

from __future__ import annotations

from dpex._torch import ExceptionWrapper


class StreamEnd:
    """The stream behind the ticket is exhausted."""


class Failure:
    """An error, as torch wraps it, to be raised where the batch would have been."""

    __slots__ = ("wrapper",)

    def __init__(self, wrapper: ExceptionWrapper) -> None:
        self.wrapper = wrapper


def where(number: int) -> str:
    """Return the place that torch names in an error that a worker caught."""
    return f"in DataLoader worker process {number}"
