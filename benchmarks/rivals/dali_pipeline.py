"""DALI on the CPU with its own operations, for the photographs: decode within a random window, resize, normalise.

The training loop gets NumPy arrays that share DALI's memory until the next batch.
"""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
from nvidia.dali import fn, pipeline_def, types
from torch.utils.data import Dataset

from benchmarks.contestants import Contestant
from benchmarks.rivals import Iterating, index_batches
from benchmarks.works.jpeg import CROP, MEAN, STD, JpegPhotographs


def opened(contestant: Contestant, dataset: Dataset[Any], batch_size: int) -> AbstractContextManager[Iterable[Any]]:
    """The pipeline with so many threads."""
    if not isinstance(dataset, JpegPhotographs):
        raise TypeError(f"there is no pipeline of DALI for {type(dataset).__name__}")
    threads = int(contestant.workers)

    def start() -> Iterator[Any]:
        pipeline = _pipeline(dataset, batch_size, batch_size=batch_size, num_threads=threads, device_id=None)
        pipeline.build()
        while True:
            images, numbers = pipeline.run()
            yield np.asarray(images.as_tensor()), np.asarray(numbers.as_tensor())

    return nullcontext(Iterating(start))


@pipeline_def
def _pipeline(dataset: JpegPhotographs, size: int) -> Any:
    files, numbers = fn.external_source(source=_files(dataset, size), num_outputs=2)
    mean, std = ((value.numpy().reshape(3) * 255).tolist() for value in (MEAN, STD))
    images = fn.decoders.image_random_crop(
        files, device="cpu", output_type=types.RGB, random_area=[0.08, 1.0], random_aspect_ratio=[3 / 4, 4 / 3]
    )
    images = fn.resize(images, resize_x=CROP, resize_y=CROP)
    return fn.crop_mirror_normalize(images, dtype=types.FLOAT, output_layout="CHW", mean=mean, std=std), numbers


def _files(dataset: JpegPhotographs, size: int) -> Iterator[tuple[list[Any], list[Any]]]:
    """The bytes of each batch's files, and the files' numbers."""
    for indices in index_batches(dataset, size):
        numbers = [index % len(dataset.files) for index in indices]
        yield [np.asarray(dataset.files[number]) for number in numbers], [np.array([number]) for number in numbers]
