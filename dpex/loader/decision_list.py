"""Decisions of the tuner as a list that a terminal and a notebook can show."""

from __future__ import annotations

from html import escape

from dpex.autotune.law.wording import brought
from dpex.autotune.types import Decision
from dpex.measure.readable import percent, rounded


class DecisionList(list[Decision]):
    """A list of decisions whose ``repr`` is a line for each."""

    def __repr__(self) -> str:
        lines = [f"{number}. {described(one)}" for number, one in enumerate(self, 1)]
        return "\n".join(lines) or "no decisions"

    def _repr_html_(self) -> str:
        rows = "".join(f'<li title="{escape(one.text)}">{escape(described(one))}</li>' for one in self)
        return f"<ol>{rows}</ol>" if rows else "<p>no decisions</p>"


def described(one: Decision) -> str:
    """A decision on one line: what changed and why, what it should bring, and what it brought."""
    expected = f"{rounded(one.predicted_rate)} batches/s with a wait of {percent(one.predicted_wait)}"
    return f"{one.old} → {one.new} ({one.reason}): expected {expected}; {brought(one)}"
