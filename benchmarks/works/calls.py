"""Datasets whose costliest call is known, each with a copy that has a clock around this call."""

from __future__ import annotations

import asyncio
import functools
import io
import os
import random
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import albumentations
import cv2
import numpy as np
import pandas
import torch
import webdataset
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import nn
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset

import dpex
from benchmarks.works import ENDLESS

PICTURE = np.kron(np.random.default_rng(0).integers(0, 255, (30, 40, 3)), np.ones((10, 10, 1))).astype(np.uint8)
FOLDER = Path(tempfile.mkdtemp(prefix="calls-"))


class Clock:
    """Adds up the wall and CPU seconds in calls of functions that it has wrapped."""

    def __init__(self) -> None:
        self.wall_s = self.cpu_s = 0.0

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def clocked(*args: Any, **options: Any) -> Any:
            began, cpu_began = time.perf_counter(), time.thread_time()
            try:
                return function(*args, **options)
            finally:
                self.wall_s += time.perf_counter() - began
                self.cpu_s += time.thread_time() - cpu_began

        return clocked


CLOCK = Clock()


def jpeg() -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(PICTURE).save(buffer, "JPEG")
    return buffer.getvalue()


JPEG = jpeg()


class Endless(Dataset[Any]):
    def __len__(self) -> int:
        return ENDLESS


class Pillow(Endless):
    def __getitem__(self, index: int) -> Any:
        picture = Image.open(io.BytesIO(JPEG)).convert("RGB")
        left, top = random.randint(0, 50), random.randint(0, 50)
        picture = picture.crop((left, top, left + 224, top + 224))
        return np.asarray(picture.resize((400, 400), Image.Resampling.LANCZOS))


class PillowCopy(Endless):
    def __getitem__(self, index: int) -> Any:
        picture = Image.open(io.BytesIO(JPEG)).convert("RGB")
        left, top = random.randint(0, 50), random.randint(0, 50)
        picture = picture.crop((left, top, left + 224, top + 224))
        return np.asarray(CLOCK(picture.resize)((400, 400), Image.Resampling.LANCZOS))


class OpenCv(Endless):
    def __getitem__(self, index: int) -> Any:
        picture = cv2.imdecode(np.frombuffer(JPEG, np.uint8), cv2.IMREAD_COLOR)
        picture = cv2.bilateralFilter(picture, 7, 50, 50)
        return cv2.resize(picture, (224, 224))


class OpenCvCopy(Endless):
    def __getitem__(self, index: int) -> Any:
        picture = cv2.imdecode(np.frombuffer(JPEG, np.uint8), cv2.IMREAD_COLOR)
        picture = CLOCK(cv2.bilateralFilter)(picture, 7, 50, 50)
        return cv2.resize(picture, (224, 224))


class NumPy(Endless):
    def __getitem__(self, index: int) -> Any:
        values = np.random.default_rng(index).random((100, 300))
        ordered = np.sort(values, axis=1)
        return np.clip(ordered, 0.1, 0.9)


class NumPyCopy(Endless):
    def __getitem__(self, index: int) -> Any:
        values = np.random.default_rng(index).random((100, 300))
        ordered = CLOCK(np.sort)(values, axis=1)
        return np.clip(ordered, 0.1, 0.9)


def operators(values: Any) -> Any:
    for power in range(1, 8):
        values = (values - 0.5) ** power / 3.0 + values * 0.9
    return values


class Operators(Endless):
    def __getitem__(self, index: int) -> Any:
        values = np.linspace(0.0, 1.0, 20_000)
        return np.sort(operators(values))


class OperatorsCopy(Endless):
    def __getitem__(self, index: int) -> Any:
        values = np.linspace(0.0, 1.0, 20_000)
        return np.sort(CLOCK(operators)(values))


class Blur(albumentations.GaussianBlur):
    """The copy's blur."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        return CLOCK(super().__call__)(*args, **options)


class Albumentations(Endless):
    def __init__(self, blur: Any = albumentations.GaussianBlur) -> None:
        steps = [albumentations.RandomCrop(224, 224), blur((21, 21), p=1.0), albumentations.HorizontalFlip(p=0.5)]
        self.pipeline = albumentations.Compose(steps)

    def __getitem__(self, index: int) -> Any:
        return self.pipeline(image=PICTURE)["image"]


class Lambdas(Endless):
    steps: Sequence[Callable[[Any], Any]] = (
        lambda values: values.flip(0),
        lambda values: values.sort(dim=0).values,
        lambda values: values * 2,
    )

    def __getitem__(self, index: int) -> Any:
        values = torch.rand(200, 100)
        for step in self.steps:
            values = step(values)
        return values


class LambdasCopy(Lambdas):
    steps = (Lambdas.steps[0], lambda values: CLOCK(values.sort)(dim=0).values, Lambdas.steps[2])


def logged(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        return function(*args)

    return wrapper


@logged
def scaled(values: Any) -> Any:
    return values * 0.5


@logged
def smoothed(values: Any) -> Any:
    return np.convolve(values, np.ones(60), "same")


class Decorated(Endless):
    def __getitem__(self, index: int) -> Any:
        return smoothed(scaled(np.random.default_rng(index).random(30_000)))


class DecoratedCopy(Endless):
    def __getitem__(self, index: int) -> Any:
        return CLOCK(smoothed)(scaled(np.random.default_rng(index).random(30_000)))


class Partial(Endless):
    def __init__(self) -> None:
        self.larger = functools.partial(nn.functional.interpolate, size=(300, 300), mode="bicubic")

    def __getitem__(self, index: int) -> Any:
        return self.larger(torch.rand(1, 3, 100, 100)).clamp(0, 1)


class PartialCopy(Partial):
    def __getitem__(self, index: int) -> Any:
        return CLOCK(self.larger)(torch.rand(1, 3, 100, 100)).clamp(0, 1)


class Modules(Endless):
    def __init__(self) -> None:
        self.net = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 8, 7)).requires_grad_(requires_grad=False)

    def __getitem__(self, index: int) -> Any:
        return self.net(torch.ones(1, 3, 96, 96))


class ModulesCopy(Modules):
    def __init__(self) -> None:
        super().__init__()
        last = self.net[2]
        last.forward = CLOCK(last.forward)


class V2Transform(nn.Module):
    """The shape of torchvision's v2 transforms: one ``forward`` of the base class, and a method of each class."""

    def forward(self, *inputs: Any) -> Any:
        return self.transform(inputs[0], {})

    def transform(self, value: Any, params: Any) -> Any:
        raise NotImplementedError


class V2Flip(V2Transform):
    def transform(self, value: Any, params: Any) -> Any:
        return value.flip(-1)


class V2Resize(V2Transform):
    def transform(self, value: Any, params: Any) -> Any:
        return nn.functional.interpolate(value, size=(200, 200), mode="bilinear", antialias=True)


class V2(Endless):
    def __init__(self) -> None:
        self.steps = nn.Sequential(V2Flip(), V2Resize())

    def __getitem__(self, index: int) -> Any:
        return self.steps(torch.ones(1, 3, 300, 300))


class V2Copy(V2):
    def __init__(self) -> None:
        super().__init__()
        resize = self.steps[1]
        resize.forward = CLOCK(resize.forward)


class Pandas(Endless):
    def __init__(self) -> None:
        number = np.arange(200_000)
        self.clicks = pandas.DataFrame({"user": number % 5000, "value": number * 0.5})

    def __getitems__(self, indices: Any) -> Any:
        part = self.clicks[self.clicks["user"].isin([index % 5000 for index in indices])]
        return [torch.from_numpy(self.merged(part)["value_x"].to_numpy()[:10].copy())] * len(indices)

    def merged(self, part: Any) -> Any:
        return part.merge(self.clicks, on="user")


class PandasCopy(Pandas):
    def merged(self, part: Any) -> Any:
        return CLOCK(part.merge)(self.clicks, on="user")


TEXT = "the quick brown fox jumps over the lazy dog and reads every word of the long book again " * 8


def tokenizer() -> Any:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.train_from_iterator([TEXT], trainers.BpeTrainer(vocab_size=60))
    return made


TOKENIZER = tokenizer()


class Texts(Endless):
    def __getitem__(self, index: int) -> Any:
        return f"{index} {TEXT}"


def tokenized(texts: Any) -> Any:
    return torch.tensor([each.ids[:100] for each in TOKENIZER.encode_batch(texts)])


def tokenized_copy(texts: Any) -> Any:
    return torch.tensor([each.ids[:100] for each in CLOCK(TOKENIZER.encode_batch)(texts)])


def thumbnail(sample: Any) -> Any:
    return np.asarray(sample["jpg"].resize((300, 300), Image.Resampling.LANCZOS))


def thumbnail_copy(sample: Any) -> Any:
    return np.asarray(CLOCK(sample["jpg"].resize)((300, 300), Image.Resampling.LANCZOS))


def webdataset_of(function: Callable[[Any], Any]) -> Any:
    path = FOLDER / "shard.tar"
    if not path.exists():
        with tarfile.open(path, "w") as tar:
            for number in range(200):
                entry = tarfile.TarInfo(f"{number}.jpg")
                entry.size = len(JPEG)
                tar.addfile(entry, io.BytesIO(JPEG))
    return webdataset.WebDataset([str(path)] * 50, shardshuffle=False).decode("pilrgb").map(function)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        for number in range(ENDLESS):
            yield self.spectrum(np.random.default_rng(number).random(20_000))

    def spectrum(self, values: Any) -> Any:
        return np.abs(np.fft.rfft(values))


class StreamCopy(Stream):
    def spectrum(self, values: Any) -> Any:
        return np.abs(CLOCK(np.fft.rfft)(values))


class Requests(Endless):
    """Awaits an answer, and computes for a quarter of that time."""

    async def __getitem__(self, index: int) -> Any:
        await asyncio.sleep(0.04)
        return np.sort(np.random.default_rng(index).random(10_000))


class RequestsCopy(Endless):
    async def __getitem__(self, index: int) -> Any:
        await asyncio.sleep(0.04)
        return CLOCK(lambda: np.sort(np.random.default_rng(index).random(10_000)))()


class SlowFiles(Endless):
    """Files that are not in the page cache."""

    def __init__(self, load: Callable[..., Any] = np.load) -> None:
        self.load = load
        self.paths = [FOLDER / f"{number}.npy" for number in range(64)]
        for path in self.paths:
            np.save(path, np.zeros(1_000_000, np.float32))
        os.sync()

    def __getitem__(self, index: int) -> Any:
        path = self.paths[index % 64]
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return self.load(path)[:1000].copy()


THREADS = ThreadPoolExecutor(4)


class Threads(Endless):
    def __getitem__(self, index: int) -> Any:
        found = [THREADS.submit(time.sleep, 0.003) for _ in range(2)]
        for each in found:
            each.result()
        return np.sort(np.random.default_rng(index).random(5000))


class ThreadsCopy(Endless):
    def __getitem__(self, index: int) -> Any:
        found = [THREADS.submit(time.sleep, 0.003) for _ in range(2)]
        for each in found:
            CLOCK(each.result)()
        return np.sort(np.random.default_rng(index).random(5000))


class Work(NamedTuple):
    """A dataset, its copy, the name that the report should give, and an option of both loaders."""

    name: str
    dataset: Callable[[], Any]
    copy: Callable[[], Any]
    call: str
    collate: tuple[Any, Any] = (len, len)
    waits: bool = False
    is_rest: bool = False
    """The clock is around all but the named call."""


def nested(dataset: Dataset[Any]) -> Dataset[Any]:
    return Subset(ConcatDataset([dataset]), range(ENDLESS))


WORKS = (
    Work("Pillow, inline", Pillow, PillowCopy, "Image.resize"),
    Work("OpenCV, inline", OpenCv, OpenCvCopy, "bilateralFilter"),
    Work("NumPy, inline", NumPy, NumPyCopy, "sort"),
    Work("operators", Operators, OperatorsCopy, "operators"),
    Work("albumentations", Albumentations, functools.partial(Albumentations, Blur), "GaussianBlur"),
    Work("a list of lambdas", Lambdas, LambdasCopy, "sort"),
    Work("decorated functions", Decorated, DecoratedCopy, "convolve"),
    Work("functools.partial", Partial, PartialCopy, "interpolate"),
    Work("nn.Sequential", Modules, ModulesCopy, "Conv2d"),
    Work("v2 transforms (their shape)", V2, V2Copy, "interpolate"),
    Work("pandas, __getitems__", Pandas, PandasCopy, "merge"),
    Work("tokenizer, collate_fn", Texts, Texts, "encode_batch", (tokenized, tokenized_copy)),
    Work("webdataset", lambda: webdataset_of(thumbnail), lambda: webdataset_of(thumbnail_copy), "Image.resize"),
    Work("a generator", Stream, StreamCopy, "rfft"),
    Work("async, awaits", Requests, RequestsCopy, "await", waits=True, is_rest=True),
    Work("np.load of slow files", SlowFiles, lambda: SlowFiles(CLOCK(np.load)), "load", waits=True),
    Work("threads", Threads, ThreadsCopy, "Future.result", waits=True),
    Work("Subset of ConcatDataset", lambda: nested(Pillow()), lambda: nested(PillowCopy()), "Image.resize"),
    Work(
        "dpex.cached, first epoch",
        *(lambda kind=kind: dpex.cached(Subset(kind(), range(20_000))) for kind in (OpenCv, OpenCvCopy)),
        "bilateralFilter",
    ),
)
