"""A hook of MkDocs: text that the code itself knows, so that it is never out of date.

`<!-- help: dpex run -->` becomes the help text of a command, `<!-- fields: dpex.PoolStats -->` a table of what a record
counts.
"""

import os
import re
from contextlib import redirect_stdout, suppress
from io import StringIO
from typing import Any

import dpex
from dpex.cli import main as cli

os.environ["COLUMNS"] = "96"  # the width of the help texts

HELP = re.compile(r"^<!-- help: (?P<command>.+?) -->$", re.MULTILINE)
FIELDS = re.compile(r"^<!-- fields: dpex\.(?P<record>\w+) -->$", re.MULTILINE)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace each marker on a page."""
    markdown = HELP.sub(lambda match: f"```text\n{help_text(match['command'])}```\n", markdown)
    return FIELDS.sub(lambda match: fields(match["record"]), markdown)


def fields(record: str) -> str:
    """Return a table of the fields of a public record. Raises AttributeError for one that does not exist."""
    declared = getattr(dpex, record).declared()
    rows = [f"| `{name}` | {one.help.replace('|', '&#124;')} | {one.unit} |" for name, one in declared.items()]
    return "\n".join(["| field | meaning | unit |", "|---|---|---|", *rows, ""])


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
