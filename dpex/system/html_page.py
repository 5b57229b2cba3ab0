"""Values that have a page, and how one is written."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path


def write_text(path: str | Path, text: str) -> Path:
    """Write ``text``, and return the path with the home directory filled in. A lone surrogate is written as an escape.

    Raises:
        OSError: It cannot be written there.
    """
    path = Path(path).expanduser()
    path.write_text(text, encoding="utf-8", errors="backslashreplace")
    return path


class HtmlPage(ABC):
    """A value that `html` shows as a page; to be derived from."""

    @abstractmethod
    def html(self) -> str:
        """Return a page that loads nothing from elsewhere."""

    def write_html(self, path: str | Path) -> Path:
        """Write the page that `html` returns.

        Args:
            path: Where to write it; ``~`` is the home directory.

        Returns:
            The path of the page.

        Raises:
            OSError: It cannot be written there.
        """
        return write_text(path, self.html())
