"""The file of a run: a line of JSON for everything that happened, written at once, so that nothing is lost.

A run of hours can be ended at any moment. Started again on the same file it goes on with what is missing, if the
machine, the commit and the settings are still those that the file began with.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from benchmarks.contestants import Contestant
from benchmarks.course import Course


class JournalError(RuntimeError):
    """A file cannot be continued, or read."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How long to measure.

    rounds: measurements of each contestant. window_s: seconds of one, from before `iter()` on. learning_window_s: the
    same for `num_workers="auto"`, which has to learn, for the rivals beside it, and for all in rows of one length.
    """

    rounds: int = 3
    window_s: float = 4.0
    learning_window_s: float = 12.0


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where the figures come from: what must not change within a file."""

    machine_id: str
    commit: str | None
    dirty: bool
    settings: Settings


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One course, or why there is none. load: the machine's, when it began."""

    row: str
    contestant: Contestant
    round: int
    course: Course | None
    error: str | None = None
    load: float = 0.0
    at: str = ""

    def as_dict(self) -> dict[str, Any]:
        """For a line of the file."""
        fields = {"kind": "measured", "row": self.row, "round": self.round, "at": self.at, "load": self.load}
        outcome = {"course": self.course.as_dict()} if self.course else {"error": self.error}
        return fields | {"contestant": self.contestant.as_dict()} | outcome

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "Measurement":
        """From what `as_dict` gave."""
        return cls(
            row=fields["row"],
            contestant=Contestant(**fields["contestant"]),
            round=fields["round"],
            course=Course.from_dict(fields["course"]) if "course" in fields else None,
            error=fields.get("error"),
            load=fields["load"],
            at=fields["at"],
        )


def now() -> str:
    """The time, for a file."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


class Journal:
    """A file of a run, read as far as it goes, and open at its end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.sessions: list[dict[str, Any]] = []
        self.measurements: list[Measurement] = []
        self._done: set[tuple[str, Contestant, int]] = set()
        for record in _whole_lines(path):
            self._take(record)

    def _take(self, record: dict[str, Any]) -> None:
        if record["kind"] == "session":
            self.sessions.append(record)
        else:
            found = Measurement.from_dict(record)
            self.measurements.append(found)
            if found.course is not None:
                self._done.add((found.row, found.contestant, found.round))

    @property
    def origin(self) -> Origin | None:
        """What the file began with; None if it is new."""
        if not self.sessions:
            return None
        first = self.sessions[0]
        fields = {name: first[name] for name in ("machine_id", "commit", "dirty")}
        return Origin(**fields, settings=Settings(**first["settings"]))

    def begin(self, origin: Origin, about: dict[str, Any]) -> None:
        """Note a session. Raises JournalError if the file began with something else."""
        known = self.origin
        if known is not None and known != origin:
            differing = [name for name, value in asdict(origin).items() if asdict(known)[name] != value]
            raise JournalError(
                f"{self.path} cannot be continued: {', '.join(differing)} differ from those that it began with. "
                f"Give --results another file, or bring back what the file began with: {known}"
            )
        self._append({"kind": "session", "at": now(), **asdict(origin), **about})

    def add(self, measurement: Measurement) -> None:
        """Note a measurement."""
        self._append(measurement.as_dict())

    def has(self, row: str, contestant: Contestant, number: int) -> bool:
        """Whether that course is there already; what failed is not."""
        return (row, contestant, number) in self._done

    def _append(self, record: dict[str, Any]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")
        self._take(record)


def _whole_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a file; half a last line, where a run was killed, is cut off. Raises JournalError."""
    if not path.exists():
        return
    text = path.read_bytes()
    whole = text[: text.rfind(b"\n") + 1]
    if whole != text:
        path.write_bytes(whole)
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            yield json.loads(line)
        except ValueError as error:
            raise JournalError(f"{path}, line {number}, is not JSON: {error}") from error
