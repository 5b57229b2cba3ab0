"""Write the reference page of the law's constants: `python -m benchmarks.simulation.constants`.

Names, values and meanings are those of `dpex.autotune.law.constants`. `without.json` beside this module has, for each
constant that was measured, the mean regret of sets of worlds with it ("as it is") and without it: ``{"headroom":
{"development": [0.0133, 0.0151]}}``.
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from dpex.autotune.law.constants import CONSTANTS, Constants

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "controller-constants.md"
MEASURED = Path(__file__).parent / "without.json"
WRITE = "python -m benchmarks.simulation.constants"
Regrets = Mapping[str, Mapping[str, Sequence[float]]]
HEAD = """
# Constants of the law

No user needs to set these: [`AutotuneConfig`](python.md) has what a user may want to change. The page
[Tuning](../explanation/tuning.md) says what each of them is for. *Regret* is the part of the batches that was lost
against the best fixed settings, in the mean over a set of simulated worlds; *without it* is with the value at which the
constant has no effect, or half or twice its own.

<!-- Made by `python -m benchmarks.simulation.constants` from dpex/autotune/law/constants.py; do not edit. -->

| constant | value | meaning and unit | regret with it, and without it |
|---|---|---|---|
"""


def page(regrets: Regrets) -> str:
    """The reference page."""
    return HEAD.lstrip() + "".join(f"{line}\n" for line in _rows(regrets))


def _rows(regrets: Regrets) -> Iterator[str]:
    for name, meaning in meanings().items():
        yield f"| `{name}` | {getattr(CONSTANTS, name):g} | {meaning} | {_told(regrets.get(name, {}))} |"


def meanings() -> dict[str, str]:
    """What each constant means, by its name: the text below its definition."""
    (definition,) = ast.parse(inspect.getsource(Constants)).body
    assert isinstance(definition, ast.ClassDef)
    found: dict[str, str] = {}
    for before, after in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(before, ast.AnnAssign) and isinstance(before.target, ast.Name) and isinstance(after, ast.Expr):
            found[before.target.id] = " ".join(str(ast.literal_eval(after.value)).split())
    return found


def _told(regrets: Mapping[str, Sequence[float]]) -> str:
    told = [f"{name} {with_it:.2%}, {without:.2%}" for name, (with_it, without) in regrets.items()]
    return "; ".join(told) or "not measured"


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
