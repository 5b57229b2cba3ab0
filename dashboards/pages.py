"""Writes what pages repeat of the code, so that they can be read in the repository: run ``python -m dashboards.pages``.

`with_metrics` writes the end of ``docs/metrics.md``. `with_blocks` writes the text between two comments of a page: the
help of a command, the fields of a record, the public names of a reference, or the verdicts of a diagnosis.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import os
import re
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import dpex
from dpex.cli import main as cli
from dpex.measure.causes import CAUSES
from dpex.telemetry.catalog import METRICS, Group, Label, Metric

DOCS = Path(__file__).parents[1] / "docs"
MARK = "<!-- The rest is written by `python -m dashboards.pages`. -->\n"
COLUMNS = "96"
"""The width of the help texts."""
_TITLES: dict[Group, str] = {
    "consumer": "The training loop and its queue",
    "workers": "Workers",
    "network": "The network",
    "tuner": "The tuner",
    "gpu": "GPU",
    "process": "The process",
}


def with_metrics(page: str) -> str:
    """Return the page with the present lists after its `MARK`."""
    parts = [page.partition(MARK)[0], MARK]
    for group, title in _TITLES.items():
        parts.append(f"\n## {title}\n")
        parts += [_described(metric) for metric in METRICS if metric.group == group]
    return "".join(parts)


def _described(metric: Metric) -> str:
    kind = " ".join(part for part in (metric.kind, metric.unit and f"in {metric.unit.replace('_', ' ')}") if part)
    lines = [f"\n### `{metric.name}`\n", f"*{kind}.* {metric.help} **Read it:** {metric.how_to_read}\n"]
    lines += [_labelled(label) for label in metric.labels]
    if metric.buckets:
        lines += [f"\nBuckets: {', '.join(f'{bound:g}' for bound in metric.buckets)}, +Inf."]
    return "\n".join(lines).rstrip() + "\n"


def _labelled(label: Label) -> str:
    values = " | ".join(f"`{value}`" for value in label.values)
    about = ": ".join(part for part in (values, label.help) if part)
    return f"- `{label.name}`" + (f" = {about}" if values else f": {about}" if about else "")


_BLOCK = re.compile(
    r"(<!-- `python -m dashboards\.pages` writes (help|fields|names|verdicts) ?([^\n>]*?) -->\n).*?(<!-- end -->\n)",
    re.DOTALL,
)
_NAME = re.compile(r"^::: dpex\.(\w+)$", re.MULTILINE)


def with_blocks(page: str) -> str:
    """Return the page with the present text of each block."""
    kinds: dict[str, Callable[[str], str]] = {
        "help": help_text,
        "fields": fields,
        "names": lambda _: names(_NAME.findall(page)),
        "verdicts": lambda _: verdicts(),
    }
    return _BLOCK.sub(lambda found: f"{found[1]}\n{kinds[found[2]](found[3])}\n{found[4]}", page)


def help_text(command: str) -> str:
    """Return the output of ``COMMAND --help``. Raises ValueError for a command that does not exist."""
    arguments = [*command.split()[1:], "--help"]
    printed, width = io.StringIO(), mock.patch.dict(os.environ, COLUMNS=COLUMNS)
    with contextlib.redirect_stdout(printed), width, contextlib.suppress(SystemExit):
        cli.main(arguments)
    if not printed.getvalue():
        raise ValueError(f"there is no command {command!r}")
    return f"```text\n{printed.getvalue()}```\n"


def fields(record: str) -> str:
    """Return a table of the fields of a public record. Raises AttributeError for a record that does not exist."""
    declared = getattr(dpex, record).declared()
    return table(("field", "meaning", "unit"), [(f"`{name}`", one.help, one.unit) for name, one in declared.items()])


def names(public: list[str]) -> str:
    """Return a table of public names, each with the first paragraph of its docstring."""
    about = {name: (inspect.getdoc(getattr(dpex, name)) or "").partition("\n\n")[0] for name in public}
    return table(("name", "what it is"), [(f"`{name}`", text.replace("\n", " ")) for name, text in about.items()])


def verdicts() -> str:
    """Return a table of the verdicts of a diagnosis."""
    rows = [(one.title, one.explanation, one.advice) for one in CAUSES.values()]
    return table(("verdict", "what it means", "what usually helps"), rows)


def table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Return a table in Markdown."""
    lines = [f"| {' | '.join(cell.replace('|', '&#124;') for cell in row)} |" for row in (header, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(header), *lines[1:], ""])


WRITERS: dict[Path, Callable[[str], str]] = {
    DOCS / "metrics.md": with_metrics,
    DOCS / "how-to" / "gpu-starves.md": with_blocks,
    DOCS / "reference" / "commands.md": with_blocks,
    DOCS / "reference" / "python.md": with_blocks,
}
"""The function that returns the present text of a page, by page."""


if __name__ == "__main__":
    for path, write in WRITERS.items():
        path.write_text(write(path.read_text()))
