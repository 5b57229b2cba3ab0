"""Streams of webdataset and Hugging Face, and as Lightning and Accelerate read them: what torch yields with as many
workers. `test_two_ranks` does the same on two ranks."""

from __future__ import annotations

from typing import Any

import pytest
from checkpoints import loaded, saved
from torch.utils.data import DataLoader

from dpex import DpexDataLoader
from dpex.loader.sizing import is_split
from tests.frameworks import stream_ways
from tests.frameworks.stream_ways import AUTO, STREAMS, doubled, write_shards

pytestmark = pytest.mark.filterwarnings("error:.*is a random generator")


def plus_one(value: int) -> int:
    return value + 1


def only_even(example: dict[str, int]) -> bool:
    return example["n"] % 2 == 0


def check(dataset: Any, *, splits: bool, epochs: int = 1, **options: Any) -> None:
    """Under "auto" a dataset yields what torch yields with as many workers."""
    with DpexDataLoader(dataset, num_workers="auto", autotune=AUTO, **options) as loader:
        assert (loader.num_workers, is_split(loader)) == (STREAMS, splits)
        for epoch in range(epochs):
            if epochs > 1:
                dataset.set_epoch(epoch)
            expected = [str(batch) for batch in DataLoader(dataset, num_workers=STREAMS, **options)]
            assert [str(batch) for batch in loader] == expected


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    pytest.importorskip("webdataset", reason="needs webdataset: pip install webdataset")
    return write_shards(tmp_path_factory.mktemp("shards"))


def test_webdataset_is_read_by_some_and_decoded_by_others(urls: list[str]) -> None:
    import webdataset as wds

    whole = wds.WebDataset(urls, shardshuffle=False)
    check(whole.decode().to_tuple("cls").map_tuple(plus_one), splits=True, batch_size=3)
    check(whole.shuffle(7, seed=3).decode().to_tuple("cls").batched(4), splits=True, batch_size=None)


def test_what_may_leave_samples_out_stays_whole(urls: list[str]) -> None:
    import webdataset as wds

    whole = wds.WebDataset(urls, shardshuffle=False)
    check(whole.decode(handler=wds.warn_and_continue).to_tuple("cls"), splits=False, batch_size=3)
    check(whole.decode().shuffle(7, seed=3), splits=False, batch_size=3)
    check(whole.to_tuple("cls"), splits=False, batch_size=3)


@pytest.fixture(scope="module")
def streaming() -> Any:
    pytest.importorskip("datasets", reason="needs datasets: pip install datasets")
    return stream_ways.streaming()


def test_streaming_of_hugging_face_is_read_by_some_and_decoded_by_others(streaming: Any) -> None:
    check(streaming.map(doubled), splits=True, batch_size=3)
    shuffled = streaming.shuffle(seed=1, buffer_size=4)
    check(shuffled.map(doubled, remove_columns=["n"]).with_format("torch"), splits=True, epochs=2, batch_size=3)


def test_maps_of_hugging_face_that_need_their_neighbours_stay_whole(streaming: Any) -> None:
    check(streaming.map(doubled, batched=True, batch_size=2, remove_columns=["n"]), splits=False, batch_size=3)
    check(streaming.map(doubled).filter(only_even), splits=False, batch_size=3)


def goes_on(dataset: Any) -> None:
    """A state in the middle of an epoch holds what the rest follows from."""
    options: dict[str, Any] = {"batch_size": 3, "num_workers": STREAMS, "seeding": "batch"}
    with DpexDataLoader(dataset, **options) as loader:
        assert is_split(loader)
        iterator = iter(loader)
        for _ in range(3):
            next(iterator)
        state = saved(loader.state_dict())
        rest = [str(batch) for batch in iterator]
    assert len(rest) == 5
    with DpexDataLoader(dataset, **options) as loader:
        loader.load_state_dict(loaded(state))
        assert [str(batch) for batch in loader] == rest


def test_webdataset_goes_on_in_the_middle_of_an_epoch(urls: list[str]) -> None:
    import webdataset as wds

    goes_on(wds.WebDataset(urls, shardshuffle=False).decode().to_tuple("cls"))


def test_streaming_of_hugging_face_goes_on_in_the_middle_of_an_epoch(streaming: Any) -> None:
    goes_on(streaming.map(doubled))


@pytest.mark.long  # `test_two_ranks` does it in two ranks
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", ["Lightning", "Accelerate dispatches", "Accelerate shards"])
def test_a_framework_reads_under_auto_what_it_reads_with_torch(way: str) -> None:
    for package in ("datasets", way.split()[0].lower()):
        pytest.importorskip(package, reason=f"needs {package}: pip install {package}")
    found = stream_ways.both(way, [], 0)
    assert len(found["torch"]) >= 4
    assert (found["auto"], found["is_apart"]) == (found["torch"], True)
