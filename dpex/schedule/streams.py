"""The streams that an iterable dataset is read in, while it is not known whether it splits itself. PURE.

Each worker iterates the dataset for itself. A dataset that does not split itself by its place among the workers would
yield each sample once per stream. A dataset that does reads that place (``id`` or ``num_workers`` of
``get_worker_info()``) before it yields its first sample. Therefore the first stream begins alone:

- If its place is read before its first sample, all streams take part. The first one has read what they read.
- If it yields its first sample without that, it stays the only stream. That sample belongs to no part, so every further
  stream would yield it again. From then on ``num_workers`` is 1 there: a dataset that splits itself later reads all
  remaining samples.

The finding holds for all later epochs of the same iterator, whose workers may have kept what they read. A loader whose
dataset does not split itself reads one stream from then on. If the dataset splits itself, each iterator finds this out
again. No other rank is asked. `dpex.loader.sizing` chooses the number of streams of a dataset that splits itself.
"""

from __future__ import annotations

from dataclasses import dataclass

ALL, ONE, UNKNOWN = 0, 1, -1
"""The number of streams that a dataset is read in: one for each logical worker, one, or not known yet."""


@dataclass(kw_only=True)
class Splitting:
    """Findings of a loader's passes about its dataset.

    Attributes:
        most: The number of streams of a dataset that splits itself.
        is_split: The dataset splits itself; None: not known.
    """

    most: int
    is_split: bool | None = None

    @property
    def streams(self) -> int:
        """The number of streams that a pass begins with."""
        return ONE if self.is_split is False else UNKNOWN

    @property
    def text(self) -> str:
        """A line that says that there is one stream, and why."""
        return (
            "auto: the dataset is read in one stream, as it did not read id or num_workers of get_worker_info() before "
            "its first sample: further streams would repeat its samples. A dataset that splits itself by these is read "
            f"in {self.most} streams, and with a number as num_workers any dataset is read in as many"
        )
