"""The value that `DpexDataLoader.plot` returns."""

from __future__ import annotations

from typing import Any

from dpex.autotune.trace.story import RunStory, fragment, page, sentence
from dpex.system.html_page import HtmlPage


class RunPlot(HtmlPage):
    """A run so far, drawn: wait, rate and workers over time, and each decision with its reasons.

    A notebook shows it where it is the last value of a cell; ``str()`` is one sentence.

    Examples:
        >>> from dpex import DpexDataLoader
        >>> with DpexDataLoader(range(6), batch_size=3, num_workers="auto", name="train") as loader:
        ...     batches = list(loader)
        ...     page = loader.plot().html()
        >>> page.startswith("<!doctype html>"), "<h1>train</h1>" in page
        (True, True)
    """

    def __init__(self, story: Any) -> None:
        self._story: RunStory = story

    def __str__(self) -> str:
        return sentence(self._story)

    def html(self) -> str:
        """Return a page that loads nothing from elsewhere."""
        return page(self._story)

    def _repr_html_(self) -> str:
        return fragment(self._story)
