"""Serve the loaders of a script with a `DpexDataLoader` behind each, and report on them at the end.

A stand-in (`dpex.loader.served.StandIn`) makes a loader's iterators. If dpex cannot serve a loader, torch makes its
iterators, and a line on stderr gives the reason. Any iterating thread may call this module.

At its end the process prints a line for each loader, and the report of the loader in which most time passed. If the
script makes a loader anew for each pass, these loaders count as one, provided that type and length of the dataset, type
of the sampler, batch size and workers are the same. An error in the report neither ends nor changes a run. A process
killed by a signal prints no report.
"""

from __future__ import annotations

import atexit
import itertools
import json
import os
import platform
import shlex
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, get_worker_info

from dpex._torch import BaseDataLoaderIter, DatasetKind
from dpex.dataloader import DpexDataLoader
from dpex.diagnose import report
from dpex.diagnose.diagnosis import Diagnosis, DiagnosisSource
from dpex.diagnose.gathering import of_launch
from dpex.diagnose.job import JobDiagnosis, RankReport
from dpex.diagnose.what_if import TUNERS
from dpex.engine.snapshots import one_after_the_other
from dpex.loader.served import BELOW_RUN, OF_WORKERS, StandIn, describe_loader, settings_of, stand_in_of, why_not_served
from dpex.measure.readable import percent, rounded
from dpex.measure.reading import Reading
from dpex.schedule.names import length_of
from dpex.system.compiler import untraced
from dpex.system.cpus import rank

if TYPE_CHECKING:
    from dpex.run.run_options import RunOptions

_SHOWN = 6
"""Maximum number of loaders that get a line each. The loader in which most time passed comes first."""


class ProxyLoader(DpexDataLoader[Any]):
    """Makes another loader's iterators."""

    def check_worker_number_rationality(self) -> None:
        """Do nothing, because torch has already warned of the loader."""


_said: set[str] = set()


@untraced
def served_iterator(
    loader: DataLoader[Any], torchs: Callable[[Any], BaseDataLoaderIter], options: RunOptions
) -> BaseDataLoaderIter:
    """Return an iterator over a loader of the script; ``torchs`` is torch's own method.

    Raises:
        OptionError: An option of ``dpex run`` does not apply to this loader.
    """
    if isinstance(loader, DpexDataLoader) or get_worker_info() is not None:
        return torchs(loader)
    reason = why_not_served(loader)
    if reason is not None:
        _print_once(f"dpex {options.command}: PyTorch's own iterators serve {describe_loader(loader)}: {reason}")
        return torchs(loader)
    proxy = updated_stand_in(loader, options)
    made = proxy._get_iterator()  # torch's ``__iter__`` keeps this iterator if workers are persistent
    add_to_report(loader, proxy, options)
    return made


def report_own_loader(loader: DpexDataLoader[Any], options: RunOptions) -> None:
    """Add a `DpexDataLoader` of the script, which keeps its own settings, to the report."""
    if not isinstance(loader, ProxyLoader) and get_worker_info() is None:
        add_to_report(loader, loader, options)


def updated_stand_in(loader: DataLoader[Any], options: RunOptions) -> DpexDataLoader[Any]:
    """Return the loader's stand-in, with the loader's data as it is now; a new one if its settings have changed."""
    given, settings = int(loader.num_workers), settings_of(loader)
    iterable = loader._dataset_kind == DatasetKind.Iterable
    workers = options.workers(given, iterable=iterable)
    made_for, known = (workers, settings, options), stand_in_of(loader)
    if known is None or not known.is_of(loader) or known.made_for != made_for:
        if not given and not workers and options.num_workers != "keep" and not iterable:
            _hint_at_workers(loader)
        torchs = {name: value for name, value in settings.items() if workers or name not in OF_WORKERS}
        behind = ProxyLoader(loader.dataset, num_workers=workers, **torchs, **options.loader_options(workers))
        known = vars(loader)[BELOW_RUN] = StandIn(loader, behind, made_for)
    made: DpexDataLoader[Any] = known.behind
    return made


def _hint_at_workers(loader: DataLoader[Any]) -> None:
    if rank(os.environ) == 0:
        _print_once(
            f"dpex run: {describe_loader(loader)} has num_workers=0 and stays in the training process; "
            "--also-in-process gives it workers"
        )


def _print_once(text: str) -> None:
    """Print a line to stderr, once per process."""
    if text not in _said:
        _said.add(text)
        print(text, file=sys.stderr, flush=True)


# -- the report at the end ---------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Served:
    """A loader of the script that dpex served.

    Attributes:
        words: The loader in words.
        given: Its number of workers in the script.
        served_by: The number of workers of its proxy; None if it is tuned.
        source: The counts of its latest proxy.
        past: The counts of earlier proxies, of this loader or of others of its kind.
        is_own: True for a `DpexDataLoader` of the script, which keeps its own settings.
    """

    loader: weakref.ref[Any]
    kind: tuple[Any, ...]
    words: str
    given: int
    served_by: int | None
    rank: int
    source: DiagnosisSource
    past: Reading = field(default_factory=Reading)
    is_own: bool = False

    def diagnose(self) -> Diagnosis:
        now = self.source.book.read()
        return self.source.diagnose(one_after_the_other(self.past, now) if self.past.passes else None)

    def continue_with(self, loader: DataLoader[Any], source: DiagnosisSource) -> None:
        """Count this loader, too."""
        if self.source.book is not source.book:
            self.past = one_after_the_other(self.past, self.source.book.read())
        self.loader, self.source = weakref.ref(loader), source


_served: list[Served] = []
_pid = 0


def add_to_report(loader: DataLoader[Any], proxy: DpexDataLoader[Any], options: RunOptions) -> None:
    """Add a loader to the report. ``proxy``: The loader that made its iterator, which may be ``loader`` itself."""
    _report_at_exit(options)
    given, source = int(loader.num_workers), proxy._diagnosis_source()
    kind = (type(loader.dataset), length_of(loader.dataset), type(loader.sampler), loader.batch_size, given)
    same = [one for one in _served if one.loader() is loader]
    ended = [one for one in _served if one.loader() is None and one.kind == kind]
    if known := same or ended:
        known[0].continue_with(loader, source)
        return
    _served.append(
        Served(
            loader=weakref.ref(loader),
            kind=kind,
            words=describe_loader(loader),
            given=given,
            served_by=None if proxy._is_auto else proxy.num_workers,
            is_own=proxy is loader,
            rank=_rank(),
            source=source,
        )
    )


def _rank() -> int:
    """Return this process's rank, from torch.distributed if the script has initialised it."""
    import torch.distributed as dist

    return dist.get_rank() if dist.is_available() and dist.is_initialized() else rank(os.environ)


def has_served() -> bool:
    """Return True if any loader was served in this process."""
    return _pid == os.getpid()


def _report_at_exit(options: RunOptions) -> None:
    """Have this process report on its loaders when it ends. A forked process forgets the loaders of its parent."""
    global _pid
    if has_served():
        return
    _pid = os.getpid()
    _served.clear()
    from multiprocessing import parent_process, util

    if parent_process() is None:
        atexit.register(report_all, options)
    else:  # a process of ``multiprocessing`` ends without calling functions registered by `atexit`
        util.Finalize(None, report_all, (options,), exitpriority=-100)


def report_all(options: RunOptions) -> None:
    """Report on all loaders, once. Only rank 0 prints."""
    served, _served[:] = list(_served) if has_served() else [], []
    try:
        found = [(one, one.diagnose()) for one in served]
        found = sorted((pair for pair in found if pair[1].facts.batches), key=lambda pair: -pair[1].facts.wall_s)
        job = _job_verdict(options, found) if options.command == "diagnose" else None
        for one, diagnosis in found:
            write_reports(options, one, diagnosis, job if diagnosis is found[0][1] else None)
        shown = [pair for pair in found if pair[0].rank == 0]
        if shown and not options.quiet:
            print("\n".join(report_lines(options, shown, job)), file=sys.stderr, flush=True)
    except Exception as error:
        print(f"dpex {options.command}: no report: {type(error).__name__}: {error}", file=sys.stderr)


def _job_verdict(options: RunOptions, found: Sequence[tuple[Served, Diagnosis]]) -> JobDiagnosis | None:
    """Return the verdict on all ranks of the launch in rank 0; None in other ranks."""
    reports = [(one.words, RankReport.of(told, one.rank, platform.node(), full=options.full)) for one, told in found]
    try:
        return of_launch(reports, os.environ)
    except Exception as error:
        print(f"dpex diagnose: the reports of the ranks are not merged: {error}", file=sys.stderr)
        return None


def report_lines(
    options: RunOptions, found: Sequence[tuple[Served, Diagnosis]], job: JobDiagnosis | None = None
) -> Iterator[str]:
    """Return the lines to print. ``job`` is about the first loader of ``found``, in which most time passed."""
    for one, diagnosis in found[:_SHOWN]:
        yield f"dpex {options.command}: {_loader_line(one, diagnosis)}"
    if len(found) > _SHOWN:
        yield f"dpex {options.command}: {len(found) - _SHOWN} more loaders were served, in which less time passed"
    first, diagnosis = found[0]
    yield ""
    shown = report.full if options.full else report.text
    yield str(job) if job is not None else shown(diagnosis, _report_width())
    yield from tuning_lines(options, first, diagnosis)


def _report_width() -> int:
    """Return the width of the report in columns: `report.COLUMNS`, or less in a narrower terminal."""
    try:
        return min(report.COLUMNS, os.get_terminal_size(sys.stderr.fileno()).columns or report.COLUMNS)
    except (OSError, ValueError):
        return report.COLUMNS


def _loader_line(served: Served, diagnosis: Diagnosis) -> str:
    facts = diagnosis.facts
    waited = f"{_wait_text(served, facts.wait_ratio)}, {rounded(facts.batches / max(1e-9, facts.wall_s))} batches/s"
    if diagnosis.verdict.cause == "too-early":
        waited = f"{facts.batches} batches, too few to say how long training waited"
    return f"{served.words}: {_workers_text(served)}, {waited}"


def _workers_text(served: Served) -> str:
    given = f"{served.given} worker{'' if served.given == 1 else 's'}"
    tuner = served.source.tuner
    if tuner is None:
        return given if served.served_by in (None, served.given) else f"{given} became {served.served_by}"
    if (tuner.settings.local, tuner.settings.remote) == (served.given, 0):
        return given
    return f"{given} became {tuner.settings}"


def _wait_text(served: Served, ratio: float) -> str:
    """Return the wait in words. If decisions were judged, add the wait before the first and after the last of them."""
    tuner = served.source.tuner
    decisions = [] if tuner is None else tuner.decisions
    outcomes = [one.outcome for one in decisions if one.outcome is not None]
    if not outcomes or "wait" not in decisions[0].evidence:
        return f"wait {percent(ratio)}"
    before, after = percent(decisions[0].evidence["wait"]), percent(outcomes[-1].wait)
    if before == after:
        return f"wait {percent(ratio)}"
    return f"wait {percent(ratio)} in all, {before} at first and {after} at the end"


def tuning_lines(options: RunOptions, served: Served, diagnosis: Diagnosis) -> list[str]:
    """Return the lines that say how to have the loader tuned, if the first advice is a setting that a tuner finds."""
    setting = diagnosis.recommendation
    if diagnosis.facts.is_tuned or setting is None or setting.kind not in TUNERS or not setting.settings.workers:
        return []
    if served.is_own:
        return ["To let dpex find and adapt this during training, give the DpexDataLoader num_workers='auto'."]
    more = [] if diagnosis.facts.workers else ["--also-in-process"]
    command = shlex.join(["dpex", "run", *more, *options.script])
    return ["To let dpex find and adapt this during training, run:", f"  {command}"]


def write_reports(options: RunOptions, served: Served, diagnosis: Diagnosis, job: JobDiagnosis | None = None) -> None:
    """Write the files of ``--html`` and ``--json``. Ranks other than 0 only write files with ``{rank}`` in the name."""

    def page(path: Path) -> None:
        of_job = [] if job is None else [job.sentence, f"First: {job.advice}"]
        diagnosis.write_html(path, [*of_job, *tuning_lines(options, served, diagnosis)])

    def data(path: Path) -> None:
        told = diagnosis.to_dict() | ({} if job is None else {"job": job.to_dict()})
        path.write_text(json.dumps(told, indent=2, allow_nan=False) + "\n", encoding="utf-8")

    asked: tuple[tuple[str | None, Callable[[Path], None]], ...] = ((options.html, page), (options.json, data))
    for name, write_to in asked:
        if name and (served.rank == 0 or "{rank}" in name):
            try:
                write_to(_new_file(name, served.rank))
            except OSError as error:
                print(f"dpex {options.command}: {name} cannot be written: {error}", file=sys.stderr)


def _new_file(name: str, rank: int) -> Path:
    """Make the empty file ``name`` with ``{pid}`` and ``{rank}`` filled in, and a number added if it exists."""
    path = wanted = Path(name.replace("{pid}", str(os.getpid())).replace("{rank}", str(rank)))
    wanted.parent.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(2):
        try:
            path.touch(exist_ok=False)
            break
        except FileExistsError:
            path = wanted.with_name(f"{wanted.stem}-{number}{wanted.suffix}")
    return path
