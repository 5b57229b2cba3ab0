"""Streams as frameworks read them: the batches of each way, with torch's loader and with dpex's under "auto".

Used by `test_framework_streams` in one process, and by `ranks` in each of two ranks.
"""

import io
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

import dpex
from dpex import AutotuneConfig, DpexDataLoader
from tests.frameworks import lightning_parts

STREAMS = 2
"""Workers of torch's, and streams of dpex's."""
Read = list[str]
AUTO = AutotuneConfig(max_streams=STREAMS)


def write_shards(folder: Path, count: int = 4, each: int = 5) -> list[str]:
    """Tar files of numbers, as webdataset reads them."""
    names = [str(folder / f"{shard}.tar") for shard in range(count)]
    for shard, name in enumerate(names):
        with tarfile.open(name, "w") as tar:
            for number in range(each):
                data = str(100 * shard + number).encode()
                entry = tarfile.TarInfo(f"{shard}-{number}.cls")
                entry.size = len(data)
                tar.addfile(entry, io.BytesIO(data))
    return names


def numbers(shards: list[int]) -> Iterator[dict[str, int]]:
    """Examples of some shards."""
    for shard in shards:
        for number in range(5):
            yield {"n": 100 * shard + number}


def doubled(example: dict[str, int]) -> dict[str, int]:
    """What decoding makes of an example."""
    return {"twice": 2 * example["n"]}


def streaming() -> Any:
    """A streaming dataset of Hugging Face with four shards."""
    from datasets import IterableDataset

    return IterableDataset.from_generator(numbers, gen_kwargs={"shards": [0, 1, 2, 3]})


def loader_of(dataset: Any, *, is_auto: bool, **options: Any) -> Any:
    """dpex's loader under "auto", or torch's with as many workers."""
    if is_auto:
        return DpexDataLoader(dataset, num_workers="auto", autotune=AUTO, **options)
    return DataLoader(dataset, num_workers=STREAMS, **options)


def read(loader: Any) -> Read:
    """Return all batches."""
    return [str(batch) for batch in loader]


def webdataset(urls: list[str], rank: int, *, is_auto: bool) -> Read:
    """A pipeline that splits its URLs among ranks."""
    import webdataset as wds

    dataset = wds.WebDataset(urls, shardshuffle=False, nodesplitter=wds.split_by_node).decode().to_tuple("cls")
    return read(loader_of(dataset, is_auto=is_auto, batch_size=3))


def hugging_face(urls: list[str], rank: int, *, is_auto: bool) -> Read:
    """A streaming dataset with a map, split among ranks by its own function."""
    from datasets.distributed import split_dataset_by_node

    dataset = split_dataset_by_node(streaming().map(doubled), rank, 2)
    return read(loader_of(dataset, is_auto=is_auto, batch_size=3))


def lightning(urls: list[str], rank: int, *, is_auto: bool) -> Read:
    """Lightning leaves streams to the dataset, and prepares the loader of each rank."""
    from datasets.distributed import split_dataset_by_node

    batches: list[str] = []

    def loss(layer: Any, batch: Any) -> Any:
        batches.append(str(batch))
        return layer(batch["twice"].float()[:, None]).mean()

    ranks: dict[str, Any] = {"devices": 2, "strategy": "ddp"} if torch.distributed.is_initialized() else {}
    dataset = split_dataset_by_node(streaming().map(doubled), rank, 2)
    module = lightning_parts.module(torch.nn.Linear(1, 1), loss)
    lightning_parts.trainer(**ranks).fit(module, loader_of(dataset, is_auto=is_auto, batch_size=2))
    return batches


def prepared(dataset: Any, *, is_auto: bool, dispatches: bool) -> Read:
    """What Accelerate's loader reads."""
    from accelerate import Accelerator, DataLoaderConfiguration

    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatches))
    loader = loader_of(dataset, is_auto=is_auto, batch_size=2)
    made = accelerator.prepare(loader)
    if is_auto:
        assert dpex.serve(made, like=loader).num_workers == STREAMS
    return read(made)


def accelerate(urls: list[str], rank: int, *, is_auto: bool) -> Read:
    """Accelerate has the first rank read for all."""
    return prepared(streaming().map(doubled), is_auto=is_auto, dispatches=True)


def accelerate_shards(urls: list[str], rank: int, *, is_auto: bool) -> Read:
    """Accelerate gives each rank its part of a streaming dataset of Hugging Face's."""
    return prepared(streaming().map(doubled), is_auto=is_auto, dispatches=False)


WAYS: dict[str, Callable[..., Read]] = {
    "webdataset": webdataset,
    "Hugging Face": hugging_face,
    "Lightning": lightning,
    "Accelerate dispatches": accelerate,
    "Accelerate shards": accelerate_shards,
}


def both(way: str, urls: list[str], rank: int) -> dict[str, Any]:
    """Return the batches of torch's loader and of dpex's."""
    return {"torch": WAYS[way](urls, rank, is_auto=False), "auto": WAYS[way](urls, rank, is_auto=True)}
