"""The table of compression, made of the newest kept run: `benchmarks.report` writes it into docs/scale.md."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.spread import Spread
from benchmarks.training import runs
from benchmarks.training.runs import Run
from benchmarks.training.tables import about, table

KEPT = runs.RESULTS / "compression"
SUBJECT = "compression"
QUOTED_ROUNDS = 3
Round = Mapping[bool, Mapping[str, Any]]
"""What was measured without compression, and with it."""


def key_of(link: str, content: str) -> str:
    """The row of a content behind a link."""
    return f"{link}: {content}"


def rounds_of(run: Run, key: str) -> list[Round]:
    """Those of a row in which both were measured."""
    found: dict[int, dict[bool, Mapping[str, Any]]] = {}
    for one in run.rows.get(key, ()):
        found.setdefault(one["round"], {})[one["may_compress"]] = one
    return [one for one in found.values() if len(one) == 2]


def compression_table(run: Run) -> str:
    """A line for each content behind each link; those where compression costs something come first."""
    header = ("link", "content", "without", "with", "with / without", "of the bytes saved")
    rows = [(where, rounds) for where in run.settings["rows"] if (rounds := rounds_of(run, key_of(*where)))]
    ordered = sorted(rows, key=lambda row: _ratio(row[1]).median >= 1.0)
    return table(header, [_line(*where, rounds) for where, rounds in ordered])


def _ratio(rounds: Sequence[Round]) -> Spread:
    """With compression, of without, within a round; infinite where nothing came without."""
    rates = [(one[True]["settled"], one[False]["settled"]) for one in rounds]
    return Spread.of([compressed / plain if plain else math.inf for compressed, plain in rates])


def _line(link: str, content: str, rounds: Sequence[Round]) -> tuple[str, ...]:
    plain, compressed = (Spread.of([one[which]["settled"] for one in rounds]).median for which in (False, True))
    saved = Spread.of([saved_ratio(one[True]) for one in rounds]).median
    ratio = _ratio(rounds)
    spread = f"{ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"
    return (link, content, f"{plain:.1f}", f"{compressed:.1f}", spread, f"{saved:.0%}")


def saved_ratio(found: Mapping[str, Any]) -> float:
    """The part of what would have travelled that did not, from the first batch on; 0 where nothing was measured."""
    nodes = found.get("nodes", {}).values()
    sent, saved = (sum(node[name] for node in nodes) for name in ("sent_bytes", "saved_bytes"))
    return float(saved / max(1, sent + saved))


def origin_text(run: Run) -> str:
    """What was measured, and on what."""
    settings = run.settings
    return (
        f"Batches per second in the second half of {settings['window_s']:g} s, medians of {settings['rounds']} rounds; "
        f"the ratios are taken within a round (range). {about(run)}."
    )


def problems(run: Run) -> list[str]:
    """What speaks against quoting a run."""
    fewest = min((len(rounds_of(run, key_of(*where))) for where in run.settings["rows"]), default=0)
    return runs.too_few(fewest, QUOTED_ROUNDS)


BLOCKS: dict[str, Callable[[Run], str]] = {"compression": compression_table, "compression-origin": origin_text}


def block(name: str) -> str:
    """The text of a block. Raises ValueError without a kept run to make it of."""
    return BLOCKS[name](runs.quoted(name, SUBJECT, KEPT))
