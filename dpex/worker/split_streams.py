"""A stream in two parts: samples are drawn by the worker that reads the stream, and decoded by any worker.

`split_of` tells whether a dataset is known to have two such parts: one made by `dpex.decode_in_workers`, a pipeline of
webdataset, or a streaming dataset of Hugging Face. `Reading` is the dataset of those who read, `Decoding` that of those
who decode. Both hold the user's own dataset and look for its parts in the worker, when an epoch begins there, so that
they see it as it is then.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterableDataset

from dpex.errors import OptionError
from dpex.system.user_warnings import warn
from dpex.worker import hugging_face, webdataset
from dpex.worker.decoded_stream import DecodedStream
from dpex.worker.raw_samples import FailedRead, RawSamples
from dpex.worker.stateful import is_stateful, load_state, state_of
from dpex.worker.stream_parts import Decode, Split

logger = logging.getLogger("dpex")


def split_of(dataset: Any) -> Split | None:
    """The parts of a dataset, or None: it is not known to have any."""
    if isinstance(dataset, DecodedStream):
        return Split(dataset.source, dataset.decode)
    try:
        return webdataset.parts(dataset) or hugging_face.parts(dataset)
    except AttributeError as error:  # a version of the library that was not seen
        logger.info("the stages of %s are not known, so it is not taken apart: %r", type(dataset).__name__, error)
        return None


def _known_split(dataset: Any) -> Split:
    split = split_of(dataset)
    assert split is not None, "asked of the dataset before it was wrapped"
    return split


class Reading(IterableDataset[Any]):
    """The samples of a dataset as they are drawn, before they are decoded."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self._source: Any = None
        self._state: Any = None

    def __iter__(self) -> Iterator[Any]:
        source = self._source = _known_split(self.dataset).source
        state, self._state = self._state, None
        load_state(source, state)
        return iter(source)

    def __copy__(self) -> Reading:
        return type(self)(copy.copy(self.dataset))


class _StatefulReading(Reading):
    """The same of what tells its state."""

    def state_dict(self) -> Any:
        """That of what is read now; None before that."""
        return state_of(self._source)

    def load_state_dict(self, state: Any) -> None:
        """For what is read next."""
        self._state = state


def reading_of(dataset: Any) -> Reading:
    """The part of ``dataset`` for those who read."""
    return (_StatefulReading if is_stateful(_known_split(dataset).source) else Reading)(dataset)


class Decoding:
    """Makes of raw samples what the dataset yields."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self._decode: Decode | None = None
        self._has_warned = False

    def __getstate__(self) -> dict[str, Any]:
        return {"dataset": self.dataset, "_decode": None, "_has_warned": False}

    def __copy__(self) -> Decoding:
        return Decoding(copy.copy(self.dataset))

    def __getitem__(self, raw: Any) -> Any:
        """The sample of a ticket that carries one."""
        return self.__getitems__(raw)[0]

    def __getitems__(self, raw: Any) -> list[Any]:
        """The samples of a ticket."""
        if isinstance(raw, FailedRead):
            raise raw.error
        assert isinstance(raw, RawSamples)
        if self._decode is None:
            self._decode = _known_split(self.dataset).decode
        samples = raw.samples()
        decoded = list(self._decode(iter(samples)))
        if len(decoded) != len(samples):
            self._tell_of_others(len(samples), len(decoded))
        return decoded

    def _tell_of_others(self, raw: int, decoded: int) -> None:
        kind = type(self.dataset).__name__
        text = (
            f"the last stages of {kind} made {decoded} samples of the {raw} samples of a batch, where dpex decodes "
            "them apart from reading"
        )
        remedy = (
            "Leave samples out before these stages, or give the loader seeding='worker', which keeps stages together"
        )
        if not decoded:
            raise OptionError(f"{text}, so there is no batch. {remedy}")
        if not self._has_warned:
            self._has_warned = True
            warn(f"{text}, so batches are not filled up with the samples that follow. {remedy}")


def users_dataset(dataset: Any) -> Any:
    """The dataset as the user knows it, where it is one of the parts."""
    return dataset.dataset if isinstance(dataset, (Reading, Decoding)) else dataset
