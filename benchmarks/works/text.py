"""Text, taken apart in pure Python: words are found, looked up and padded.

The text is the language reference that Python ships, repeated until it is larger than the last-level cache.
"""

import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import torch
from torch.utils.data import Dataset

from benchmarks.tables import data_file, rows_beyond_cache, write_whole
from benchmarks.works import ENDLESS

DOCUMENT_BYTES = 1024
LENGTH = 256
"""Words of a sample; shorter documents are padded, longer ones cut."""
STRIDE = 1_000_003
UNKNOWN = 0
PATTERN = re.compile(r"[a-z]+|[.,]")


class Corpus:
    """One long text in a file, as documents of 1 KB. It pickles as its path and length."""

    def __init__(self, documents: int) -> None:
        self.documents = documents
        if not self.path.exists():
            write_whole(self.path, _text(documents * DOCUMENT_BYTES))

    @property
    def path(self) -> Path:
        return data_file(f"reference-{self.documents}.txt")

    @cached_property
    def _mapped(self) -> np.ndarray:
        return np.memmap(self.path, np.uint8, "r")

    def __reduce__(self) -> tuple[type, tuple[int]]:
        return type(self), (self.documents,)

    def document(self, index: int) -> str:
        """The text at which `index` lies."""
        start = index * STRIDE % self.documents * DOCUMENT_BYTES
        return self._mapped[start : start + DOCUMENT_BYTES].tobytes().decode("ascii")


def corpus() -> Corpus:
    """A text larger than the last-level cache."""
    return Corpus(rows_beyond_cache(DOCUMENT_BYTES))


def words() -> list[str]:
    """The vocabulary, in the order of the text."""
    return list(dict.fromkeys(word for page in topics.values() for word in PATTERN.findall(page.lower())))


class Documents(Dataset[torch.Tensor]):
    """Sample: int64 of shape (256,), the numbers of a document's words."""

    def __init__(self) -> None:
        self.corpus = corpus()
        self.numbers = {word: number for number, word in enumerate(words(), 1)}

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> torch.Tensor:
        found = PATTERN.findall(self.corpus.document(index).lower())
        numbers = [self.numbers.get(word, UNKNOWN) for word in found[:LENGTH]]
        return torch.tensor(numbers + [UNKNOWN] * (LENGTH - len(numbers)))


def _text(size: int) -> Iterator[bytes]:
    """So many bytes of the language reference."""
    once = "\n\n".join(topics.values()).encode("ascii", "replace")
    yield from (once[: size - start] for start in range(0, size, len(once)))
