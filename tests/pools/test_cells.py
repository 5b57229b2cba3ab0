"""What a cell of a notebook defines reaches spawned workers and comes back, where Ray is not installed.

``python -c`` stands for the notebook: neither has a script that a worker could import.
"""

import json
from functools import cache

import pytest
from programs import ran

CELL = """
import dataclasses, json, multiprocessing, sys
from collections import namedtuple
sys.modules["ray"] = None  # as where Ray is not installed
import torch
from dpex import DpexDataLoader

Pair = namedtuple("Pair", "first second")

@dataclasses.dataclass
class Box:
    value: torch.Tensor

class CellError(Exception):
    pass

class Pictures(torch.utils.data.Dataset):
    make = staticmethod(lambda index: torch.tensor(index))

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return self.make(index)

class Pairs(Pictures):
    make = staticmethod(lambda index: Pair(index, index + 1))

class Failing(Pictures):
    def __getitem__(self, index):
        raise CellError(index)

class Shares(Pictures):
    def __init__(self, context):
        context = multiprocessing.get_context(context)
        self.made, self.lock = torch.zeros(4).share_memory_(), context.Lock()
        self.reader, self.writer = context.Pipe()

    def __getitem__(self, index):
        with self.lock:
            self.made[index] += 1
            self.writer.send(index)
        return index

def stack(samples):
    return torch.stack(samples)

def shown(dataset, context, **options):
    with DpexDataLoader(dataset, 2, num_workers=1, multiprocessing_context=context, **options) as loader:
        try:
            return [show(batch) for batch in loader]
        except CellError as error:
            return type(error).__name__

def show(batch):
    if type(batch) is Pair:
        return ["Pair", *map(show, batch)]
    return ["Box", show(batch.value)] if type(batch) is Box else batch.tolist()

def seed(worker):
    Pictures.offset = worker

context = sys.argv[1]
shares = Shares(context)
shown(shares, context)
print(json.dumps({
    "what a dataset shares": [shares.made.tolist(), [shares.reader.recv() for _ in range(4)]],
    "a class": shown(Pictures(), context),
    "a function": shown(Pictures(), context, collate_fn=stack, worker_init_fn=seed),
    "a lambda": shown(Pictures(), context, collate_fn=lambda samples: torch.stack(samples)),
    "a batch of a named tuple": shown(Pairs(), context),
    "a batch of a class": shown(Pictures(), context, collate_fn=lambda samples: Box(torch.stack(samples))),
    "an error": shown(Failing(), context),
}))
"""
FOUR = [[0, 1], [2, 3]]
EXPECTED = {
    "a class": FOUR,
    "a function": FOUR,
    "a lambda": FOUR,
    "a batch of a named tuple": [["Pair", [0, 1], [1, 2]], ["Pair", [2, 3], [3, 4]]],
    "a batch of a class": [["Box", each] for each in FOUR],
    "an error": "CellError",
    "what a dataset shares": [[1, 1, 1, 1], [0, 1, 2, 3]],
}


@cache
def found(context: str) -> dict[str, object]:
    return json.loads(ran("-c", CELL, context, timeout=200).stdout)  # type: ignore[no-any-return]


@pytest.mark.parametrize("context", ["spawn", pytest.param("forkserver", marks=pytest.mark.long)])
@pytest.mark.parametrize("what", EXPECTED)
def test_what_a_cell_defines_reaches_workers(context: str, what: str) -> None:
    assert found(context)[what] == EXPECTED[what]
