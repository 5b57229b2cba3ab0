"""In how many streams an iterable dataset is read, where only its first stream can show it. PURE.

Each stream iterates the whole dataset. A dataset that does not split itself would yield each sample once per stream. A
dataset splits itself by its place among the workers, so it reads that place (``id`` or ``num_workers`` of
``get_worker_info()``) before it yields its first sample. Therefore the first stream begins alone:

- Where its place is read before its first sample, all streams take part. The first one has read what they read.
- Where it yields its first sample without that, it stays the only stream: that sample belongs to no part, and every
  further stream would yield it again. From then on ``num_workers`` is 1 there, so that a dataset which splits itself
  later takes all that is left.

What was found holds for all later epochs of the same iterator, whose workers may have kept what they read. A loader
whose dataset does not split itself reads one stream from then on; one whose dataset does has this found out again in
each iterator.
"""

from __future__ import annotations

from dataclasses import dataclass

ALL, ONE, UNKNOWN = 0, 1, -1
"""In how many streams a dataset is read: one for each logical worker, one, or not known yet."""


@dataclass(kw_only=True)
class Splitting:
    """What the passes of a loader have found out.

    is_split: whether its dataset splits itself; None: not known. most: streams that it is read in then.
    """

    most: int
    is_split: bool | None = None

    @property
    def streams(self) -> int:
        """In how many streams a pass begins."""
        return ONE if self.is_split is False else UNKNOWN

    @property
    def text(self) -> str:
        """That there is one stream, and why, as one line."""
        return (
            "auto: the dataset is read in one stream, as it did not read id or num_workers of get_worker_info() before "
            "its first sample: further streams would repeat its samples. A dataset that splits itself by these is read "
            f"in {self.most} streams, and with a number as num_workers any dataset is read in as many"
        )
