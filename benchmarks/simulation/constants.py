"""Write the reference page of the controller's constants: `python -m benchmarks.simulation.constants`.

It is made from the descriptions in `dpex.autotune.constants`, and from what `benchmarks.simulation.without` measured.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.simulation.without import Without, read
from dpex.autotune.constants import Constants, Description
from dpex.autotune.constants.groups import PARTS

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "controller-constants.md"
WRITE = "python -m benchmarks.simulation.constants"
HEAD = """
# Constants of the controller

Nobody needs to set these: [`AutotuneConfig`](python.md) has what a user may want to change. This page says what the
controller takes for granted, and why, for those who read its decisions or change it.

*Without it* says what became of the simulator's scenarios with another value: that with which the constant has no
effect ("off"), or else half or twice its own. It names the scenario whose regret grew most (the part of the batches
that was lost against the best fixed settings), or else one that missed a target that it had met. Where no scenario got
worse, the constant stands for a case that these scenarios do not have, or other constants make up for it.

<!-- Made by `python -m benchmarks.simulation.constants` from dpex/autotune/constants; do not edit. -->
"""


def page(entries: Mapping[str, Sequence[Without]]) -> str:
    """The reference page."""
    return "\n".join(_page(entries)) + "\n"


def _page(entries: Mapping[str, Sequence[Without]]) -> Iterator[str]:
    yield HEAD.strip()
    for part, groups in PARTS.items():
        yield ""
        yield f"## {part}"
        for group in groups:
            yield from _group(group, entries)


def _group(group: Constants, entries: Mapping[str, Sequence[Without]]) -> Iterator[str]:
    yield ""
    yield f"### `{group.group()}`"
    yield ""
    yield (group.__doc__ or "").strip()
    yield ""
    yield "| constant | value | range | meaning, and why this value | without it |"
    yield "|---|---|---|---|---|"
    for each in group.described():
        name = each.name.partition(".")[2]
        cells = (f"`{name}`", _quantity(each.value, each.unit), f"{_number(each.low)} to {_number(each.high)}")
        yield f"| {' | '.join(cells)} | {each.meaning} {each.why} | {_told(each, entries.get(each.name, ()))} |"


def _told(constant: Description, found: Sequence[Without]) -> str:
    current = [each for each in found if each.value == constant.value]
    if not current:
        return "not measured"
    worst = max(current, key=lambda each: (bool(each.worst), each.target == "regret", each.after - each.before))
    instead = "off" if constant.off is not None else f"at {_number(worst.instead)}"
    if worst.worst:
        return f"{instead}: `{worst.worst}` {_change(worst)}"
    different = max(each.different for each in current)
    decided = f"{different} of {worst.scenarios} decide otherwise" if different else "no decision changes"
    return f"none gets worse; {decided}"


def _change(found: Without) -> str:
    if found.target == "regret":
        return f"has a regret of {found.after:.1%} instead of {found.before:.1%}"
    return f"misses its target of {found.target} ({found.after:g})"


def _quantity(value: float, unit: str) -> str:
    return _number(value) if unit in ("share", "ratio") else f"{_number(value)} {unit}"


def _number(value: float) -> str:
    return "∞" if math.isinf(value) else re.sub(r"e([+-])0*", _exponent, f"{value:g}")


def _exponent(found: re.Match[str]) -> str:
    return f"e{found[1].strip('+')}"


def main() -> int:
    """The command."""
    PAGE.write_text(page(read()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
