"""What the tests of ``dpex bench`` measure."""

import time

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

THREE = 3


class Compose:
    def __init__(self, *transforms):
        self.transforms = list(transforms)

    def __call__(self, image):
        for transform in self.transforms:
            image = transform(image)
        return image


def waits(image):
    time.sleep(0.004)
    return image


def computes(image):
    end = time.thread_time() + 0.004
    while time.thread_time() < end:
        sum(range(5000))  # so that there are few calls: what being told of them takes is subtracted
    return image


class Images(Dataset):
    def __init__(self):
        self.image = torch.zeros(3, 32, 32)
        self.transform = Compose(waits, computes)

    def __len__(self):
        return 40

    def __getitem__(self, index):
        return self.transform(self.image), index


class Stream(IterableDataset):
    def __iter__(self):
        yield from range(10)


def images():
    return Images()


def doubled(batch):
    return len(batch) * 2


loader = DataLoader(Images(), 5)
empty = []
