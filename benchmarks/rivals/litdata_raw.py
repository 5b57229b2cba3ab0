"""LitData: the raw files of a bucket, requested by the event loop of each worker of PyTorch's loader.

It reads stores alone, so it takes part where files come over HTTP: their server answers clients of S3 as well.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from litdata.raw.dataset import StreamingRawDataset
from litdata.raw.indexer import BaseIndexer, FileMetadata
from litdata.streaming import downloader
from torch.utils.data import DataLoader, Dataset, default_collate

from benchmarks.contestants import Contestant
from benchmarks.rivals import index_batches
from benchmarks.works.web_server import FILE_BYTES, FILES, MACHINE

BUCKET = "s3://files"
NO_KEYS = {"AWS_ACCESS_KEY_ID": "-", "AWS_SECRET_ACCESS_KEY": "-", "AWS_REGION": "us-east-1"}


class _Files(BaseIndexer):
    """The files of the server, which lists none."""

    def discover_files(self, input_dir: str, storage_options: dict[str, Any] | None) -> list[FileMetadata]:
        return [FileMetadata(path=f"{input_dir}/{number}", size=FILE_BYTES) for number in range(FILES)]

    def build_or_load_index(self, input_dir: str, *_: Any) -> list[FileMetadata]:
        return self.discover_files(input_dir, None)


class _Batches:
    """The numbers of the files of every batch."""

    def __init__(self, dataset: Dataset[Any], batch_size: int) -> None:
        self._batches = index_batches(dataset, batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        return ([index % FILES for index in batch] for batch in self._batches)


def _collated(bodies: list[bytes]) -> torch.Tensor:
    batch: torch.Tensor = default_collate([torch.frombuffer(bytearray(body), dtype=torch.uint8) for body in bodies])
    return batch


def opened(contestant: Contestant, dataset: Dataset[Any], batch_size: int) -> AbstractContextManager[Iterable[Any]]:
    """The files with so many workers."""
    os.environ.update(NO_KEYS)
    downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True  # it has no setting for stores without TLS
    at = {"endpoint_url": f"http://{MACHINE}:{dataset.port}"}  # type: ignore[attr-defined]
    files = StreamingRawDataset(BUCKET, indexer=_Files(), storage_options=at)
    batches: Any = _Batches(dataset, batch_size)
    workers = int(contestant.workers)
    return nullcontext(DataLoader(files, batch_sampler=batches, num_workers=workers, collate_fn=_collated))
