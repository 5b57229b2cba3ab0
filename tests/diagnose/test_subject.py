"""What the heading of a report says of a loader."""

from torch.utils.data import BatchSampler, SequentialSampler

from dpex import DpexDataLoader


def test_batch_size_of_a_batch_sampler_is_shown() -> None:
    batches = BatchSampler(SequentialSampler(range(8)), 4, drop_last=False)
    with DpexDataLoader(list(range(8)), batch_sampler=batches) as loader:
        assert len(list(loader)) == 2
        assert loader.diagnose().facts.batch_size == "4"
