"""A loader in a notebook, drawn, and below progress bars."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from dpex import AutotuneConfig, DpexDataLoader
from dpex.autotune.trace.story import NOTHING
from dpex.loader.shown import story_of
from tests.unit.diagnose.test_report import Tags

DATA = TensorDataset(torch.arange(400))
ENDLESS = 10_000_000


def html_of(loader: Any) -> str:
    text: str = loader._repr_html_()
    Tags().feed(text)
    return text


def test_a_loader_that_was_not_iterated_says_so() -> None:
    text = html_of(DpexDataLoader(DATA, 4, num_workers="auto", name="<train>"))
    assert "DpexDataLoader &lt;train&gt;" in text
    assert "TensorDataset, batch size 4, num_workers=&quot;auto&quot;, not iterated yet" in text
    assert "No batch was delivered yet." in text


def test_a_loader_with_a_fixed_number_says_what_it_did() -> None:
    loader = DpexDataLoader(DATA, 4, num_workers=1)
    assert sum(len(batch) for (batch,) in loader) == 400
    text = html_of(loader)
    assert "num_workers=1, not tuned, so nothing is measured over time" in text
    assert "Pass 1: 100 batches, " in text
    assert str(loader.plot()) == NOTHING


def test_a_tuned_loader_shows_its_wait_over_time_while_it_runs() -> None:
    config = AutotuneConfig(interval_s=0.05, max_local=1)
    with DpexDataLoader(range(ENDLESS), num_workers="auto", autotune=config, name="train") as loader:
        iterator: Any = iter(loader)
        assert any(len(story_of(loader).points) > 1 for _ in iterator)
        text, plot = html_of(loader), loader.plot()
        assert "Wait: the training loop" in text
        assert 'class="line"' in text
        assert "<h1>train</h1>" in plot.html()
        assert "lost to loading" in str(plot)
        assert html_of(plot).startswith('<section class="dpex-run">')


@pytest.mark.parametrize("kind", ["tqdm", "rich"])
def test_nothing_is_written_below_a_progress_bar(kind: str, capfd: pytest.CaptureFixture[str]) -> None:
    shown = io.StringIO()
    with DpexDataLoader(DATA, 4, num_workers="auto") as loader:
        assert sum(len(batch) for (batch,) in tracked(kind, loader, shown)) == 400
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")
    assert "100/100" in shown.getvalue() or "100%" in shown.getvalue()


def tracked(kind: str, loader: Any, shown: io.StringIO) -> Any:
    if kind == "tqdm":
        tqdm = pytest.importorskip("tqdm", reason="needs tqdm: pip install tqdm")
        return tqdm.tqdm(loader, file=shown, mininterval=0)
    from rich.console import Console
    from rich.progress import track

    return track(loader, console=Console(file=shown, force_terminal=True, width=80))
