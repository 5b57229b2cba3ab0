"""A plain PyTorch script, as people write them: it knows nothing of dpex. Prints what it saw as JSON."""

import json
import pickle
import random
import sys

import numpy as np
import torch
import torch.utils.data
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info


class Rows(Dataset):
    """Row number, and its augmentation from three generators."""

    def __init__(self, length=24):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        drawn = [random.random(), float(np.random.rand()), float(torch.rand(()))]
        return index, torch.tensor(drawn, dtype=torch.float64)


class Stream(IterableDataset):
    """Split among workers, as torch's documentation has it."""

    def __iter__(self):
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        yield from range(first, 20, step)


class InfiniteLoader(DataLoader):
    """As Lightning users and others have them: arguments of its own, and more batches than torch's."""

    def __init__(self, epochs, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.epochs = epochs

    def __iter__(self):
        for _ in range(self.epochs):
            yield from super().__iter__()


def seen(loader):
    """Indices and augmentations of a pass."""
    return [[index.tolist(), rows.tolist()] for index, rows in loader]


def loaders():
    def seeded():
        return torch.Generator().manual_seed(7)

    yield "shuffled", DataLoader(Rows(), 4, shuffle=True, num_workers=2, generator=seeded())
    yield "again", DataLoader(Rows(), 4, shuffle=True, num_workers=2, generator=seeded())
    yield "module", torch.utils.data.DataLoader(Rows(), batch_size=5, num_workers=2, drop_last=True)
    yield "subclass", InfiniteLoader(2, Rows(), 6, shuffle=True, num_workers=2)
    yield "unpickled", pickle.loads(pickle.dumps(DataLoader(Rows(), 8, num_workers=2)))
    yield "in process", DataLoader(Rows(), 4, shuffle=True)


def main():
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    torch.set_num_threads(1)
    told = {"argv": sys.argv, "file": __file__, "path": sys.path[0], "name": __name__, "passes": {}, "kinds": {}}
    for name, loader in loaders():
        told["passes"][name] = seen(loader)
        told["kinds"][name] = [type(loader).__module__, isinstance(loader, DataLoader), loader.num_workers]

    persistent = DataLoader(Rows(), 4, num_workers=2, persistent_workers=True)
    told["passes"]["persistent"] = seen(persistent) + seen(persistent)
    told["stream"] = [batch.tolist() for batch in DataLoader(Stream(), 3, num_workers=2)]
    told["iterator"] = type(iter(DataLoader(Rows(), num_workers=1))).__module__

    model = nn.DataParallel(nn.Linear(3, 1, dtype=torch.float64))
    losses = [float(model(rows).square().mean()) for _, rows in DataLoader(Rows(), 4, num_workers=2)]
    told["losses"] = losses
    print(json.dumps(told))


if __name__ == "__main__":
    main()
