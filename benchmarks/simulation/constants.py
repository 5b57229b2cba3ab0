"""Write the reference page of the law's constants: `python -m benchmarks.simulation.constants`.

Names, values and meanings are those of `dpex.autotune.constants`. `without.json` beside this module has, for each
constant that was replaced, the value ``instead``, the mean regrets of two groups of worlds (``all``, ``growth``), and
what happened in one ``world``. The entry "as it is" has the mean regrets with all constants as they are.
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dpex.autotune.constants import CONSTANTS, Constants

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "controller-constants.md"
MEASURED = Path(__file__).parent / "without.json"
WRITE = "python -m benchmarks.simulation.constants"
Regrets = Mapping[str, Mapping[str, Any]]
AS_IT_IS = "as it is"
HEAD = """
# Constants of the law

This page is for maintainers of the tuner. It lists the constants of [the law](../explanation/tuning.md) that tunes
`num_workers="auto"`, and the regret without each. No user needs to set them: [`AutotuneConfig`](python.md) has the
settings that a user may want to change. Instead of 1.2, `AutotuneConfig(headroom=1)` has regrets of 2.09 % and 8.54 %
in the worlds below (`correlated-wait-strong`: 5.31 % instead of 0.58 %). `wait_goal=0.001` instead of 0.01 has one of
2.09 %.

*Regret* is the share of the batches that was lost against the best fixed setting. It is a mean over simulated worlds:
60 worlds from all sets, and 22 worlds in which growth may fail. In each row one constant is replaced by the value
*instead*, and all others stay. It was measured shortly before the last small changes of the law, except for
`uneven_room`, which was measured after them. `times` and `apart` came later and have no figures. A row
that says "measured with" dates from when these constants were one: all of them were replaced together.

<!-- Made by `python -m benchmarks.simulation.constants` from dpex/autotune/constants.py; do not edit. -->

| constant | value | meaning and unit | instead | 60 worlds | 22 worlds | a world that changes |
|---|---|---|---|---|---|---|
"""


def page(regrets: Regrets) -> str:
    """The reference page."""
    return HEAD.lstrip() + "".join(f"{line}\n" for line in _rows(regrets))


def _rows(regrets: Regrets) -> Iterator[str]:
    if AS_IT_IS in regrets:
        yield f"| all as they are | | | | {_told(regrets[AS_IT_IS])} | |"
    for name, meaning in meanings().items():
        found = regrets.get(name, {})
        meaning += f" Measured with {found['with']}." if "with" in found else ""
        first = f"| `{name}` | {getattr(CONSTANTS, name):g} | {meaning} | {found.get('instead', '')}"
        yield f"{first} | {_told(found)} | {found.get('world', '')} |"


def _told(found: Mapping[str, Any]) -> str:
    return " | ".join(f"{100 * found[name]:.2f} %" if name in found else "" for name in ("all", "growth"))


def meanings() -> dict[str, str]:
    """What each constant means, by its name: the text below its definition."""
    (definition,) = ast.parse(inspect.getsource(Constants)).body
    assert isinstance(definition, ast.ClassDef)
    found: dict[str, str] = {}
    for before, after in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(before, ast.AnnAssign) and isinstance(before.target, ast.Name) and isinstance(after, ast.Expr):
            found[before.target.id] = " ".join(str(ast.literal_eval(after.value)).split())
    return found


def read() -> Regrets:
    """What was measured; empty where nothing was."""
    if not MEASURED.exists():
        return {}
    found: Regrets = json.loads(MEASURED.read_text())
    return found


def main() -> int:
    """The command."""
    PAGE.write_text(page(read()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
