"""A recorded tree as rows. Small branches are folded, and a node is named by its path from the root.

In a path, each name is followed by the place of the call, unless hidden code makes the call: "load >
Photos.__getitem__ > Image.resize (train.py:31)". The row `OWN_CODE` below a function is its time outside its calls.
"""

from __future__ import annotations

from collections.abc import Iterator

from dpex.measure.batch_times import OWN_CODE, WITHIN, CallRow
from dpex.profile.call_names import lines_of, place
from dpex.profile.call_tree import CallNode

LEAST = 0.02  # share of the batch; a smaller branch is folded into the row above it
MOST_ROWS = 32  # maximum rows of a stage; a batch has two stages with calls


class _Branch:
    """Nodes with the same name below the same parent, which become one row."""

    def __init__(self, nodes: list[CallNode]) -> None:
        self.nodes = nodes
        groups: dict[str, list[CallNode]] = {}
        for node in nodes:
            for child in node.children.values():
                name = f"{child.label} {place(*child.site)}" if child.site[0] else child.label
                groups.setdefault(name, []).append(child)
        self.within = {name: _Branch(group) for name, group in groups.items()}
        self.own_s, self.own_wait_s = sum(one.wall_s for one in nodes), sum(one.wait_s for one in nodes)
        self.wall_s: float = self.own_s + sum(one.wall_s for one in self.within.values())
        self.wait_s: float = self.own_wait_s + sum(one.wait_s for one in self.within.values())
        self.draws: bool = any(one.draws for one in nodes)
        self.has_drawn: bool = self.draws or any(one.has_drawn for one in self.within.values())

    def rows(self, path: str, least_s: float) -> Iterator[CallRow]:
        """Yield the row of this branch, and the rows of the branches within it in the order of their first calls.

        A nested branch that takes less than ``least_s`` seconds has no row, unless it draws random numbers.
        """
        kept = {name: one for name, one in self.within.items() if one.wall_s >= least_s or one.has_drawn}
        kept = kept if self.wall_s >= least_s else {}
        wall_s = self.wall_s - sum(one.wall_s for one in kept.values())
        wait_s = self.wait_s - sum(one.wait_s for one in kept.values())
        code, calls = self.nodes[0].code, sum(one.calls for one in self.nodes) or 1
        has_own = bool(kept) and code is not None and self.own_s >= least_s
        if has_own:
            wall_s, wait_s = wall_s - self.own_s, wait_s - self.own_wait_s
        draws = self.draws if kept else self.has_drawn
        yield path, calls, max(0.0, wall_s), max(0.0, wall_s - wait_s), int(draws)
        if has_own and code is not None:
            name = f"{path}{WITHIN}{OWN_CODE} {place(code.co_filename, lines_of(code))}"
            yield name, calls, self.own_s, self.own_s - self.own_wait_s, 0
        for name, one in kept.items():
            yield from one.rows(f"{path}{WITHIN}{name}", least_s)


def rows_of(root: CallNode, stage_ratio: float) -> list[CallRow]:
    """Return at most `MOST_ROWS` rows of a stage. ``stage_ratio``: The stage's share of the batch, 0 to 1."""
    tree = _Branch([root])
    least_s = LEAST * tree.wall_s / max(0.1, stage_ratio)
    while len(rows := list(tree.rows(root.label, least_s))) > MOST_ROWS:
        least_s = 1.5 * least_s or 1e-9
    return rows
