"""The ranks of a job on one machine tell each other what they need of its CPUs, in a file.

The file lies in a directory of the user's that is removed with the last file in it, or in ``$DPEX_METRICS_DIR``. It is
named for the job, as launchers tell it. Each rank reads and writes it about once a second, under a lock of the file
that is never waited for. In it are what each rank measured and how many CPUs it holds. A rank takes more only of what
is left beside what the others hold, so together they never hold more than there is, however old what they know is; it
gives back as soon as it is to have less. A rank that has not told of itself, or not for a while, keeps an equal part.

A file needs no launcher's port, no order of calls and no library, and it works beside any communication of the job's: a
collective call in a thread of dpex's could come between two of the training loop. The CPUs of one machine concern only
ranks on it; room on a cluster is divided by its own coordinator.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import math
import os
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dpex.schedule.rank_shares import UNIT_CPUS, RankLoad, divided
from dpex.system.clock import Clock, monotonic
from dpex.system.cpus import local_ranks, usable_cpus
from dpex.system.directories import (
    DIRECTORY_VARIABLE,
    LONGEST_FILE,
    job_directories,
    opened,
    prepare,
    remove_if_empty,
)

FORGOTTEN_S = 10.0
"""A rank that has told nothing for so long has an equal part again: it evaluates, or has ended."""
PREFIX = "ranks-of-"
"""Of the file's name, which must not look like an announcement: Prometheus reads all of those."""
OLD_S = 86_400.0
"""A file that nobody has written for a day is of a job whose ranks were killed, and is removed."""
LEAVE_EVERY_S, LEAVE_TRIES = 0.005, 40
"""Another rank has the file for less than a millisecond, unless it was stopped: who leaves does not wait for that."""
_OPENINGS = 3
"""The last rank to leave removes the file and its directory; who has just opened them opens others."""
_JOB = (
    *("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_ID", "SLURM_STEP_ID"),
    *("OMPI_MCA_ess_base_jobid", "PMIX_NAMESPACE"),
)
"""What launchers set alike in all ranks of a job, and differently in another job on the same machine."""
_TELLING = {"MASTER_PORT", "SLURM_JOB_ID", "OMPI_MCA_ess_base_jobid", "PMIX_NAMESPACE"}
"""At least one of them: without, two jobs could not be told apart."""
_RANKS = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")


def job_name(environ: Mapping[str, str], network: str) -> str | None:
    """A file's name for the job of this process; None if launchers do not tell it. ``network``: a namespace's, as ports
    are of one."""
    told = {name: environ[name] for name in _JOB if environ.get(name)}
    if not _TELLING & set(told):
        return None
    return PREFIX + hashlib.sha256(repr((sorted(told.items()), network)).encode()).hexdigest()[:16]


def rank_name(environ: Mapping[str, str]) -> str | None:
    """This rank among those of the machine."""
    return next((environ[name] for name in _RANKS if environ.get(name, "").isdigit()), None)


@dataclass(frozen=True, kw_only=True)
class _RankEntry:
    """A rank: what it told, when, and the CPUs that it holds."""

    load: RankLoad
    at: float
    held: float

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> _RankEntry:
        """From what was written. Raises ValueError, TypeError or KeyError for what no rank writes."""
        load = RankLoad(**{name: _quantity(value) for name, value in told["load"].items()})
        return cls(load=load, at=_quantity(told["at"]), held=_quantity(told["held"]))


def _quantity(value: Any) -> float:
    number = float(value)
    if not 0.0 <= number < math.inf:
        raise ValueError(f"{value!r} is no quantity")
    return number


@dataclass(frozen=True, kw_only=True)
class RankCpus:
    """CPUs that this rank may use, and those that other ranks of the job keep busy."""

    cpus: float
    used_by_others: float


class RankBoard:
    """See the module. Used by one thread at a time.

    Args:
        directory: Where the file lies; ``own``: it is this user's alone, and goes with the last file in it.
        name: The file's name, the same in all ranks of the job.
        rank: This rank among those of the machine.
        ranks: How many these are.
        total: The CPUs of the machine that they divide.
    """

    def __init__(
        self, directory: Path, *, own: bool, name: str, rank: str, ranks: int, total: float, clock: Clock = monotonic
    ) -> None:
        self._directory, self._own, self._name = directory, own, name
        self._rank, self._ranks, self._total = rank, ranks, total
        self._clock = clock
        self._latest: RankCpus | None = None

    def report(self, load: RankLoad) -> RankCpus | None:
        """Tell of this rank, and return what it may use; what that was last where another rank writes just now; None
        where the file cannot be used."""
        try:
            with self._locked() as file:
                if file is not None:
                    self._latest = self._exchange(file, load)
        except (OSError, ValueError):
            self._latest = None
        return self._latest

    def leave(self) -> None:
        """Tell no more; the last rank removes the file. Whoever cannot is forgotten after a while."""
        with contextlib.suppress(OSError, ValueError):
            for _ in range(LEAVE_TRIES):
                if self._left():
                    break
                time.sleep(LEAVE_EVERY_S)
        if self._own:
            remove_if_empty(self._directory)

    def _left(self) -> bool:
        """Whether the file is without this rank now; not while another has it."""
        with self._locked() as file:
            if file is None:
                return False
            entries = self._read(file)
            entries.pop(self._rank, None)
            if entries:
                self._write(file, entries)
            else:
                with opened(self._directory, own=self._own) as inside:
                    os.unlink(self._name, dir_fd=inside)
            return True

    def _exchange(self, file: int, load: RankLoad) -> RankCpus:
        entries, now = self._read(file), self._clock()
        others = {rank: entry for rank, entry in entries.items() if rank != self._rank}
        loads = {rank: entry.load for rank, entry in others.items()} | {self._rank: load}
        share = divided(self._total, self._ranks, loads)[self._rank]
        silent = max(0, self._ranks - len(loads)) * self._total / self._ranks
        left = self._total - silent - sum(entry.held for entry in others.values())
        has = entries[self._rank].held if self._rank in entries else 0.0
        held = max(0.0, min(share, max(left, has)))
        self._write(file, others | {self._rank: _RankEntry(load=load, at=now, held=held)})
        missing = (self._ranks - len(loads)) * load.used
        used = sum(entry.load.used for entry in others.values()) + max(0.0, missing)
        return RankCpus(cpus=max(held, UNIT_CPUS), used_by_others=used)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[int | None]:
        """The file, locked; None while another rank has it."""
        for _ in range(_OPENINGS):
            file = self._opened_file()
            if file is None:
                continue
            try:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    yield None
                    return
                if os.fstat(file).st_nlink:
                    yield file
                    return
            finally:
                os.close(file)
        yield None

    def _opened_file(self) -> int | None:
        """The file, made if need be; None if the last rank of another job has just removed the directory."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            if self._own:
                prepare(self._directory, own=True)
            with opened(self._directory, own=self._own) as inside:
                return os.open(self._name, flags, 0o600, dir_fd=inside)
        except FileNotFoundError:
            if not self._own:
                raise
            return None

    def _read(self, file: int) -> dict[str, _RankEntry]:
        """Those who told of themselves lately; nobody if that is no such file."""
        now = self._clock()
        try:
            told = json.loads(os.pread(file, LONGEST_FILE, 0) or b"{}")
            found = {rank: _RankEntry.of(one) for rank, one in told.items()}
        except (ValueError, TypeError, KeyError, AttributeError):
            return {}
        return {rank: entry for rank, entry in found.items() if abs(now - entry.at) <= FORGOTTEN_S}

    @staticmethod
    def _write(file: int, entries: Mapping[str, _RankEntry]) -> None:
        text = json.dumps({rank: asdict(entry) for rank, entry in entries.items()}).encode()
        os.ftruncate(file, 0)
        os.pwrite(file, text, 0)


def board_of(environ: Mapping[str, str]) -> RankBoard | None:
    """Of this process's job; None where it is the only rank here, or launchers do not tell enough."""
    ranks, rank = local_ranks(environ), rank_name(environ)
    name = job_name(environ, _network())
    if ranks < 2 or rank is None or name is None:
        return None
    given = environ.get(DIRECTORY_VARIABLE)
    for directory in [Path(given)] if given else job_directories(environ):
        with contextlib.suppress(OSError):
            prepare(directory, own=not given)
            with opened(directory, own=not given):
                _tidy(directory)
                return RankBoard(directory, own=not given, name=name, rank=rank, ranks=ranks, total=usable_cpus())
    return None


def _tidy(directory: Path) -> None:
    for path in directory.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            if time.time() - path.lstat().st_mtime > OLD_S:
                path.unlink()


def _network() -> str:
    try:
        return str(Path("/proc/self/ns/net").readlink())
    except OSError:
        return ""


class RankShare:
    """The part of the CPUs that this rank's tuned loaders have, all together. From any thread; a forked process has no
    part in it."""

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._loads: dict[int, RankLoad] = {}
        self._board: RankBoard | None = None

    def report(self, loader: int, load: RankLoad) -> RankCpus | None:
        """Tell of one loader; None where CPUs are divided evenly."""
        if self._pid != os.getpid():
            self._forget()
        with self._lock:
            if not self._loads:
                self._board = board_of(os.environ)
            self._loads[loader] = load
            first, *others = self._loads.values()
            for other in others:
                first = first.plus(other)
            return None if self._board is None else self._board.report(first)

    def leave(self, loader: int) -> None:
        """It is not tuned any more. Idempotent."""
        if self._pid != os.getpid():
            return
        with self._lock:
            if self._loads.pop(loader, None) is not None and not self._loads and self._board is not None:
                self._board.leave()


rank_share = RankShare()
