"""Warn that each worker copies the Python objects of a dataset. PURE."""

from __future__ import annotations

from dataclasses import dataclass

from dpex.measure.readable import size

LEAST_BYTES = 64 << 20
"""Minimum bytes that a worker must have copied for a warning."""


@dataclass(frozen=True, kw_only=True)
class HeldObjects:
    """The attribute of a dataset with the most bytes of Python objects.

    Attributes:
        text: The attribute in words, such as "`rows`: a list of 2,100,000 dict"; "" if none holds objects.
        nbytes: Estimated bytes of the objects, from a sample of them.
    """

    text: str = ""
    nbytes: int = 0


def warning(held: HeldObjects, workers: int, private_bytes: float) -> str:
    """Return a warning that workers have copied the dataset's objects; "" if they have not.

    Args:
        held: The objects of the dataset.
        workers: Local workers that run.
        private_bytes: Median private memory of a worker, in bytes.
    """
    copied = min(private_bytes, held.nbytes)
    if workers < 1 or copied < max(LEAST_BYTES, held.nbytes // 4):
        return ""
    who = f"each of {workers} workers has" if workers > 1 else "the worker has"
    what = f"{size(copied)} of the dataset's objects ({held.text})"
    return f"{who} copied {what}. To avoid the copies, put the objects into `dpex.compact`."
