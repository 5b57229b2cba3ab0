"""webdataset: JPEG files in tar shards, of which each worker reads its own, made batches of in the workers."""

import io
import tarfile
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import webdataset as wds
from torch.utils.data import Dataset

from benchmarks.contestants import Contestant
from benchmarks.tables import Blobs, data_file
from benchmarks.works.jpeg import JpegPhotographs, prepared

SHARDS = 8


def opened(contestant: Contestant, dataset: Dataset[Any], batch_size: int) -> AbstractContextManager[Iterable[Any]]:
    """The shards, again and again, with so many workers. Makes the shards if they are missing."""
    if not isinstance(dataset, JpegPhotographs):
        raise TypeError(f"there are no shards of {type(dataset).__name__}")
    shards = [str(_shard(dataset.files, number)) for number in range(SHARDS)]
    samples = wds.WebDataset(shards, shardshuffle=False).to_tuple("jpg", "cls").map(_sample)
    batches = samples.batched(batch_size, partial=False).repeat()
    return nullcontext(wds.WebLoader(batches, batch_size=None, num_workers=int(contestant.workers)))


def _sample(found: tuple[bytes, bytes]) -> tuple[torch.Tensor, int]:
    encoded, number = found
    return prepared(np.frombuffer(encoded, np.uint8)), int(number)


def _shard(files: Blobs, number: int) -> Path:
    """Each eighth file, as a tar file."""
    path = data_file(f"{files.name}-{files.count}-{number}.tar")
    if not path.exists():
        unfinished = path.with_suffix(".unfinished")
        with tarfile.open(unfinished, "w") as shard:
            for at in range(number, files.count, SHARDS):
                for kind, content in (("jpg", files[at].tobytes()), ("cls", str(at).encode())):
                    about = tarfile.TarInfo(f"{at:08}.{kind}")
                    about.size = len(content)
                    shard.addfile(about, io.BytesIO(content))
        unfinished.replace(path)
    return path
