"""Streams of webdataset and Hugging Face, and as Lightning and Accelerate read them: what torch yields with as many
workers. `test_two_ranks` does the same on two ranks."""

from typing import Any

import pytest
from checkpoints import loaded, saved
from torch.utils.data import DataLoader

from dpex import DpexDataLoader, decode_in_workers
from dpex.loader.sizing import is_split
from tests.frameworks import stream_ways
from tests.frameworks.stream_ways import AUTO, STREAMS, doubled, write_shards

pytestmark = pytest.mark.filterwarnings("error:.*is a random generator")


def number(sample: dict[str, Any]) -> int:
    return int(sample["cls"])


def check(dataset: Any, *, splits: bool, epochs: int = 1, **options: Any) -> None:
    """Under "auto" a dataset yields what torch yields with as many workers, whoever decodes it."""
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


def test_webdataset_under_auto_is_as_with_torch(urls: list[str]) -> None:
    import webdataset as wds

    whole = wds.WebDataset(urls, shardshuffle=False)
    check(whole.shuffle(7, seed=3).decode().to_tuple("cls").batched(4), splits=False, batch_size=None)
    check(decode_in_workers(whole.shuffle(7, seed=3), number), splits=True, batch_size=3)


@pytest.fixture(scope="module")
def streaming() -> Any:
    pytest.importorskip("datasets", reason="needs datasets: pip install datasets")
    return stream_ways.streaming()


def test_streaming_of_hugging_face_under_auto_is_as_with_torch(streaming: Any) -> None:
    check(streaming.map(doubled), splits=False, batch_size=3)
    check(decode_in_workers(streaming.shuffle(seed=1, buffer_size=4), doubled), splits=True, epochs=2, batch_size=3)


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


def test_a_hugging_face_stream_resumes_in_mid_epoch(streaming: Any) -> None:
    goes_on(decode_in_workers(streaming, doubled))


@pytest.mark.long  # `test_two_ranks` does it in two ranks
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", ["Lightning", "Accelerate dispatches", "Accelerate shards"])
def test_a_framework_reads_under_auto_what_it_reads_with_torch(way: str) -> None:
    for package in ("datasets", way.split()[0].lower()):
        pytest.importorskip(package, reason=f"needs {package}: pip install {package}")
    found = stream_ways.both(way, [], 0)
    assert len(found["torch"]) >= 4
    assert found["auto"] == found["torch"]
