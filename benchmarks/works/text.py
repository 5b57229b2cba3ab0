"""Text, taken apart in pure Python: words are found, looked up and padded."""

import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset

from benchmarks.tables import data_file, rows_beyond_cache, write_whole
from benchmarks.works import ENDLESS

DOCUMENT_BYTES = 1024
LENGTH = 256
"""Words of a sample; shorter documents are padded, longer ones cut."""
VOCABULARY = 20_000
WORDS_AT_ONCE = 100_000
ZIPF = 1.3
"""Exponent of the law by which common words are common."""
STRIDE = 1_000_003
UNKNOWN = 0
PATTERN = re.compile(r"[a-z]+|[.,]")
SYLLABLES = ("ba", "de", "fi", "go", "ku", "la", "me", "ni", "po", "ru", "sa", "te", "vi", "wo", "zu", "an")


class Corpus:
    """One long text in a file, as documents of 1 KB. It pickles as its path and length."""

    def __init__(self, documents: int) -> None:
        self.documents = documents
        if not self.path.exists():
            write_whole(self.path, _text(documents * DOCUMENT_BYTES))

    @property
    def path(self) -> Path:
        return data_file(f"corpus-{self.documents}.txt")

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
    """The vocabulary, the most common first."""
    rng = np.random.default_rng(0)
    drawn = rng.integers(0, len(SYLLABLES), (4 * VOCABULARY, 4)).tolist()
    lengths = rng.integers(1, 5, len(drawn)).tolist()
    spelled = ("".join(SYLLABLES[one] for one in row[:length]) for row, length in zip(drawn, lengths, strict=True))
    return list(dict.fromkeys((".", ",", *spelled)))[:VOCABULARY]


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
    """So many bytes of words."""
    rng, vocabulary, written = np.random.default_rng(1), np.array(words(), dtype=object), 0
    while written < size:
        chosen = np.minimum(rng.zipf(ZIPF, WORDS_AT_ONCE), VOCABULARY) - 1
        piece = (" ".join(vocabulary[chosen]) + " ").encode("ascii")[: size - written]
        written += len(piece)
        yield piece
