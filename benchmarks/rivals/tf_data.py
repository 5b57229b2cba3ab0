"""tf.data with TensorFlow's own operations, for the photographs and the large images.

The consumer gets NumPy arrays that share TensorFlow's memory, as `as_numpy_iterator` gives them.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import tensorflow as tf
from torch.utils.data import Dataset

from benchmarks.contestants import Contestant
from benchmarks.rivals import Iterating
from benchmarks.works.jpeg import CROP, MEAN, STD, JpegPhotographs
from benchmarks.works.tensors import CLASSES, Images


def opened(contestant: Contestant, dataset: Dataset[Any], batch_size: int) -> AbstractContextManager[Iterable[Any]]:
    """The pipeline for one of the two works, with so many parallel calls, or as many as tf.data finds best."""
    calls = tf.data.AUTOTUNE if contestant.workers == "auto" else int(contestant.workers)
    batches = _batches_of(dataset)

    def start() -> Iterator[Any]:
        return batches(batch_size, calls).prefetch(tf.data.AUTOTUNE).as_numpy_iterator()

    return nullcontext(Iterating(start))


def _batches_of(dataset: Any) -> Callable[[int, int], Any]:
    if isinstance(dataset, JpegPhotographs):
        return _photographs(dataset)
    if isinstance(dataset, Images):
        return _images(dataset)
    raise TypeError(f"there is no tf.data pipeline for {type(dataset).__name__}")


def _photographs(dataset: JpegPhotographs) -> Callable[[int, int], Any]:
    """Decode within a random window, resize, normalise: all of it native."""
    files = tf.constant([dataset.files[number].tobytes() for number in range(len(dataset.files))])
    mean, std = (tf.constant(value.numpy().reshape(3) * 255, tf.float32) for value in (MEAN, STD))

    def sample(index: Any) -> Any:
        number = index % len(dataset.files)
        window = _window(tf.image.extract_jpeg_shape(files[number]))
        image = tf.image.decode_and_crop_jpeg(files[number], window, channels=3)
        resized = tf.image.resize(image, (CROP, CROP))
        return tf.transpose((resized - mean) / std, (2, 0, 1)), number

    def batches(batch_size: int, calls: int) -> Any:
        indices = tf.data.Dataset.range(len(dataset))
        return indices.map(sample, num_parallel_calls=calls).batch(batch_size, drop_remainder=True)

    return batches


def _window(shape: Any) -> Any:
    """A random window of 8 to 100 % of the area and 3:4 to 4:3 in shape, as `works.jpeg` draws it."""
    height, width = tf.cast(shape[0], tf.float32), tf.cast(shape[1], tf.float32)
    area, ratio = height * width * tf.random.uniform([], 0.08, 1.0), tf.random.uniform([], 3 / 4, 4 / 3)
    sides = [tf.sqrt(area / ratio), tf.sqrt(area * ratio)]
    crop = [tf.clip_by_value(tf.round(side), 1.0, most) for side, most in zip(sides, (height, width), strict=True)]
    offsets = [
        tf.floor(tf.random.uniform([]) * (most - side + 1)) for side, most in zip(crop, (height, width), strict=True)
    ]
    return tf.cast(tf.stack([*offsets, *crop]), tf.int32)


def _images(dataset: Images) -> Callable[[int, int], Any]:
    """Gather the rows of a batch from a tensor."""
    table = tf.constant(np.asarray(dataset.rows))
    rows, stride = dataset.table.rows, dataset.STRIDE

    def batch(indices: Any) -> Any:
        return tf.gather(table, indices * stride % rows), indices % CLASSES

    def batches(batch_size: int, calls: int) -> Any:
        return tf.data.Dataset.range(len(dataset)).batch(batch_size, drop_remainder=True).map(batch, calls)

    return batches
