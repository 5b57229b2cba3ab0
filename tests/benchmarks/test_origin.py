"""The origin's tables: the page shows the kept results, and each step of the pipeline has the same pixels."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.origin import __main__ as origin
from benchmarks.origin.steps import FILES, Crops, Decoded, Pictures, normalised_together
from benchmarks.parts import places, rewritten


@pytest.mark.skipif(not origin.KEPT.exists(), reason="no results are kept")
def test_the_page_has_the_kept_tables() -> None:
    text = origin.DOCUMENT.read_text()
    tables = origin.tables(json.loads(origin.KEPT.read_text()))
    assert set(tables) <= places(text)
    assert rewritten(text, tables) == text


class Noise(Decoded):
    """Images that no file holds."""

    def __getitem__(self, number: int) -> np.ndarray:
        return np.random.default_rng(number).integers(0, 256, (188, 250, 3), np.uint8)


def test_vectorised_preprocessing_gives_the_same_pixels() -> None:
    images, numbers = Noise(Path()), [3, FILES - 1, 7]
    random.seed(5)
    alone = torch.stack([Pictures(images)[number] for number in numbers])
    random.seed(5)
    together = normalised_together(Crops(images).__getitems__(numbers))
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-5)
