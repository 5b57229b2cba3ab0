"""A hook of MkDocs: puts the help text of a command where a page says `<!-- help: dpex run -->`.

The command itself is asked while the site is built, so the text is never out of date.
"""

import os
import re
from contextlib import redirect_stdout, suppress
from io import StringIO
from typing import Any

from dpex.cli import main as cli

os.environ["COLUMNS"] = "96"  # the width of the help texts

MARKER = re.compile(r"^<!-- help: (?P<command>.+?) -->$", re.MULTILINE)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace each marker on a page by the help text of its command."""
    return MARKER.sub(lambda match: f"```text\n{help_text(match['command'])}```\n", markdown)


def help_text(command: str) -> str:
    """Return what ``COMMAND --help`` prints. Raises KeyError for a command that does not exist."""
    words: list[str] = []
    while command != "dpex":
        command, _, word = command.rpartition(" ")
        if not command:
            raise KeyError(f"there is no command {word!r}")
        words.insert(0, word)
    with redirect_stdout(StringIO()) as printed, suppress(SystemExit):
        cli.main([*words, "--help"])
    return printed.getvalue()
