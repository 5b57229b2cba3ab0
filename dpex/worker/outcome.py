"""What a worker makes in place of a batch: the end of a stream, or an error."""

from __future__ import annotations

from dpex._torch import ExceptionWrapper


class StreamEnd:
    """Made in place of a batch: the stream behind the ticket is exhausted."""


class Failure:
    """Made in place of a batch: the error, as torch wraps it, to be raised where the batch would have been."""

    __slots__ = ("wrapper",)

    def __init__(self, wrapper: ExceptionWrapper) -> None:
        self.wrapper = wrapper


def where(number: int) -> str:
    """The place torch names in an error that a worker caught."""
    return f"in DataLoader worker process {number}"
