"""What is shown in a terminal, fresh every second, or printed line by line where there is no terminal."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

from rich.console import Console, RenderableType
from rich.live import Live

EVERY_S = 1.0
"""How often what is shown is drawn anew: what it shows is measured once a second."""


def follow(look: Callable[[], RenderableType], console: Console, stop: threading.Event | None) -> None:
    """Show what ``look`` returns again and again, until ``stop`` is set or Ctrl-C."""
    stop = stop or threading.Event()
    live = None
    if console.is_terminal:
        live = Live(console=console, screen=True, auto_refresh=False, vertical_overflow="crop")
    with contextlib.suppress(KeyboardInterrupt), live or contextlib.nullcontext():
        while True:
            shown = look()
            if live is None:
                console.print(shown)
            else:
                live.update(shown, refresh=True)
            if stop.wait(EVERY_S):
                return
