"""What a loader found goes through print, pickle, JSON and files, and another run begins there, within its limits."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from dpex import AutotuneConfig, DpexDataLoader, Tuned
from dpex.autotune.runtime.tuned import start_of
from dpex.errors import OptionError
from dpex.system.cpus import rank_cpus

FOUND = Tuned(local=6, prefetch=40)


def begun(start: Any, **limits: Any) -> DpexDataLoader[Any]:
    config = AutotuneConfig(start=start, **limits)
    return DpexDataLoader(range(64), batch_size=4, num_workers="auto", distribute_mode=False, autotune=config)


def test_it_prints_pickles_and_goes_into_json_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    assert str(FOUND) == "6 local, prefetch 40"
    assert pickle.loads(pickle.dumps(FOUND)) == FOUND
    FOUND.save(tmp_path / "found-{rank}.json")
    assert [path.name for path in tmp_path.iterdir()] == ["found-3.json"]
    forms = (FOUND, json.loads(json.dumps(FOUND.as_dict())), str(tmp_path / "found-{rank}.json"))
    assert [start_of(AutotuneConfig(start=form)) for form in forms] == [FOUND] * 3
    assert start_of(AutotuneConfig()) is None
    monkeypatch.setenv("HOME", str(tmp_path))
    FOUND.save("~/home.json")
    assert start_of(AutotuneConfig(start="~/home.json")) == FOUND


def test_a_loader_begins_there_within_its_limits() -> None:
    assert begun(FOUND).tuned == FOUND
    assert begun(FOUND, max_local=4, max_prefetch=10).tuned == Tuned(local=4, prefetch=10)
    assert begun(Tuned(local=0, remote=8, prefetch=64)).tuned == Tuned(local=1, prefetch=64)
    most = max(AutotuneConfig().max_waiting, int(rank_cpus()))
    assert begun(Tuned(local=2 * most, prefetch=4 * most)).tuned == Tuned(local=most, prefetch=4 * most)
    loader = begun(FOUND)
    loader.resize(local=2)
    assert loader.tuned.local == 2


def test_its_arguments_fix_the_same_numbers() -> None:
    data = list(range(8))
    fixed: DpexDataLoader[Any] = DpexDataLoader(data, **FOUND.arguments())
    assert (fixed.num_workers, fixed.prefetch_factor, fixed.seeding) == (6, 7, "batch")
    torchs: DataLoader[Any] = DataLoader(data, **FOUND.torch_arguments())  # type: ignore[arg-type]
    assert (torchs.num_workers, torchs.prefetch_factor) == (6, 7)
    inline: DpexDataLoader[Any] = DpexDataLoader(data)
    assert DpexDataLoader(data, **inline.tuned.arguments()).num_workers == 0
    assert start_of(AutotuneConfig(start=inline.tuned)) == inline.tuned
    config = Tuned(local=2, remote=8, prefetch=64).arguments()["autotune"]
    assert (config.min_local, config.max_local, config.min_remote, config.max_remote) == (2, 2, 8, 8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dpex_tuned": 2}, r"no settings of version 1 \(\{'dpex_tuned': 2"),
        ({"local": -1}, r"local=-1 is not a whole number of at least 0"),
        ({"prefetch": True}, r"prefetch=True is not a whole number of at least 1"),
    ],
)
def test_what_is_of_another_kind_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    values = FOUND.as_dict() | changes
    path = tmp_path / "found.json"
    path.write_text(json.dumps(values))
    for start in (values, path):
        with pytest.raises(OptionError, match=message + ".*give loader"):
            begun(start)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"start='.*none\.json'\): .*No such file.*give loader\.tuned"):
        begun(str(tmp_path / "none.json"))
    for text in ("{", "3"):
        (tmp_path / "odd.json").write_text(text)
        with pytest.raises(OptionError, match=r"odd\.json.*give loader\.tuned"):
            begun(str(tmp_path / "odd.json"))
