"""All that a loader's diagnosis is made from, without the loader: it may be gone by then. From any thread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from dpex.autotune.types import Decision
from dpex.diagnose.counters import Account, Book, Context, facts_of

if TYPE_CHECKING:
    from dpex.diagnose.diagnosis import Diagnosis


class Tunes(Protocol):
    """What of a tuner is read."""

    @property
    def decisions(self) -> Sequence[Decision]:
        """All so far."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A loader's book, what is known of it without measuring, and its tuner if it has one."""

    book: Book
    context: Context
    tuner: Tunes | None = None

    def diagnose(self, account: Account | None = None) -> Diagnosis:
        """What can be concluded from these counts, or from all in the book; 50 to 100 ms of CPU."""
        from dpex.diagnose.diagnosis import diagnose

        account = account or self.book.read()
        note = "" if account.batches else self.context.note
        decisions = tuple(self.tuner.decisions) if self.tuner is not None else ()
        return diagnose(facts_of(account, replace(self.context, note=note, decisions=decisions)))
