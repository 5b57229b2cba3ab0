"""Check the structure of dpex, which `make lint` does: no import leads back to its own module, also if only types are
imported, and no module is too long.

Imports inside of functions and under ``if TYPE_CHECKING`` count like all others.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Collection, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

MOST_LINES = 450
LONG = {"dpex.engine.engine", "dpex.pools.agent.pool", "dpex.pools.local.pool", "dpex.pools.ray.nodes"}
"""Modules that may be longer until their folder is redesigned. The list only shrinks."""
REDESIGNED = ("dpex.engine.", "dpex.pools.", "dpex.worker.")
"""The folders whose modules may be in the list."""


def modules(package: Path) -> dict[str, str]:
    """Return the source of each module of a package by its name."""
    found = {}
    for path in package.rglob("*.py"):
        name = ".".join((package.name, *path.relative_to(package).with_suffix("").parts))
        found[name.removesuffix(".__init__")] = path.read_text()
    return found


def imported(source: str, names: Collection[str]) -> set[str]:
    """Return the modules among ``names`` that a module imports."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            within = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in names else str(node.module) for name in within}
    return found & set(names)


def circle(sources: dict[str, str]) -> list[str]:
    """Return a circle of imports, with its first module at both ends; an empty list without a circle."""
    graph = {name: imported(source, sources) - {name} for name, source in sources.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1][::-1]  # type: ignore[no-any-return]
    return []


def faults(sources: dict[str, str], long: Collection[str] = LONG) -> Iterator[str]:
    """Yield a sentence for each fault of these modules."""
    if found := circle(sources):
        yield f"imports form a circle: {' -> '.join(found)}"
    lengths = {name: len(source.splitlines()) for name, source in sources.items()}
    for name in sorted(lengths):
        if lengths[name] > MOST_LINES and name not in long:
            yield f"{name} has {lengths[name]} lines, but a module has at most {MOST_LINES}"
    for name in sorted(long):
        if not name.startswith(REDESIGNED):
            yield f"{name} may not be an exception: only modules of {', '.join(REDESIGNED)} may"
        if lengths.get(name, 0) <= MOST_LINES:
            yield f"{name} has {lengths.get(name, 0)} lines and needs no exception: remove it from LONG"


if __name__ == "__main__":
    found = list(faults(modules(Path(__file__).parents[1] / "dpex")))
    sys.exit("\n".join(found) if found else 0)
