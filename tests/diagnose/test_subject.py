"""What the heading of a report says of a loader."""

from typing import Any

from torch.utils.data import BatchSampler, Dataset, SequentialSampler

from dpex import DpexDataLoader


class Asynchronous(Dataset[Any]):
    def __len__(self) -> int:
        return 64

    async def __getitem__(self, index: int) -> Any:
        return index


def test_batches_that_a_worker_makes_at_the_same_time_are_known() -> None:
    for dataset, prefetch, lanes in ((Asynchronous(), None, 8), (Asynchronous(), 16, 8), (range(64), None, 1)):
        with DpexDataLoader(dataset, batch_size=8, num_workers=2, prefetch_factor=prefetch) as loader:
            assert len(list(loader)) == 8
            assert loader.diagnose().facts.lanes == lanes


def test_batch_size_of_a_batch_sampler_is_shown() -> None:
    batches = BatchSampler(SequentialSampler(range(8)), 4, drop_last=False)
    with DpexDataLoader(list(range(8)), batch_sampler=batches) as loader:
        assert len(list(loader)) == 2
        assert loader.diagnose().facts.batch_size == "4"
