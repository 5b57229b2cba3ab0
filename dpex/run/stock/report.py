"""Keeps what ``dpex diagnose`` counted of each loader, and prints or writes it when the process ends.

A loader that is made anew for each pass, with the same kind of dataset, batch size and workers, is one loader here.
Nothing that goes wrong here ends or changes a run.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dpex._torch import DatasetKind
from dpex.diagnose.diagnosis import Diagnosis, diagnose
from dpex.diagnose.facts import Facts, TransformFacts, of_all
from dpex.diagnose.report import wrapped
from dpex.diagnose.source import Context, facts_of
from dpex.diagnose.what_if import TUNERS, Prediction
from dpex.engine.loader_counters import LoaderCounters
from dpex.loader.at_exit import free_path
from dpex.run.options import DiagnoseOptions
from dpex.run.stock.probe import ProbeError, transforms_of
from dpex.system.cpus import rank

_SHOWN = 6
"""Further loaders that get a line each."""
_IN_TORCH = "encoding and pinning: PyTorch's workers and threads do both unobserved; they are part of the wait"


@dataclass(kw_only=True)
class _Entry:
    """One loader; ``dataset`` is kept for the probe at the end."""

    loader: weakref.ref[Any]
    kind: tuple[Any, ...]
    context: Context
    options: DiagnoseOptions
    is_stream: bool
    workers: int
    subject: tuple[Any, Any, int | None] | None
    book: LoaderCounters = field(default_factory=LoaderCounters)


_entries: list[_Entry] = []
_counted: list[bool] = []


def forget() -> None:
    """In a forked process: what was counted is the parent's to tell."""
    _entries.clear()
    _counted.clear()


def has_counted() -> bool:
    """Whether any loader was iterated in this process."""
    return bool(_counted)


def book_of(loader: Any, options: DiagnoseOptions, torch_rank: int) -> LoaderCounters:
    """Where this loader is counted."""
    kind = (type(loader.dataset), loader.batch_size, loader.num_workers)
    for entry in _entries:
        known = entry.loader()
        if known is loader or (known is None and entry.kind == kind):
            entry.loader = weakref.ref(loader)
            break
    else:
        entry = _new(loader, kind, options, torch_rank)
        _entries.append(entry)
        _counted[:] = [True]
        _report_at_end_of_child()
    entry.subject = _subject(loader, entry)
    return entry.book


def _new(loader: Any, kind: tuple[Any, ...], options: DiagnoseOptions, torch_rank: int) -> _Entry:
    context = Context(
        name="PyTorch's loader",
        rank=max(rank(os.environ), torch_rank),
        dataset=type(loader.dataset).__name__,
        batch_size=str(loader.batch_size),
        keeps_workers=loader._dataset_kind == DatasetKind.Iterable,
        starts_anew=not loader.persistent_workers,
        note=_IN_TORCH if loader.num_workers else "",
    )
    return _Entry(
        loader=weakref.ref(loader),
        kind=kind,
        context=context,
        options=options,
        is_stream=loader._dataset_kind == DatasetKind.Iterable,
        workers=loader.num_workers,
        subject=None,
    )


def _subject(loader: Any, entry: _Entry) -> tuple[Any, Any, int | None] | None:
    """What the probe would measure."""
    if entry.is_stream or not entry.options.probe:
        return None
    return loader.dataset, loader.collate_fn, loader.batch_size


def _report_at_end_of_child() -> None:
    """A process of ``multiprocessing`` ends without what others do at their end."""
    from multiprocessing import parent_process, util

    if len(_entries) == 1 and parent_process() is not None:
        util.Finalize(None, report_all, exitpriority=-100)


# -- the end -----------------------------------------------------------------------------------------------------------


def report_all() -> None:
    """Say what was found; once."""
    entries, _entries[:] = list(_entries), []
    try:
        _report(entries)
    except Exception as error:
        print(f"dpex diagnose: no diagnosis: {type(error).__name__}: {error}", file=sys.stderr)


def _report(entries: list[_Entry]) -> None:
    found = [(entry, facts_of(entry.book.read(), entry.context)) for entry in entries]
    found.sort(key=lambda pair: -pair[1].wall_s)
    for number, (entry, facts) in enumerate(found):
        is_first = number == 0
        facts = (
            _probed(entry, facts)
            if is_first
            else _without_transforms(facts, "they are timed for the first loader only")
        )
        diagnosis = diagnose(facts)
        _write(entry.options, diagnosis)
        if facts.rank == 0 and number <= _SHOWN:
            _print(entry.options, diagnosis, is_first=is_first)


def _probed(entry: _Entry, facts: Facts) -> Facts:
    """With the transforms timed, in this process and now, where that can be and may be."""
    if entry.is_stream:
        return _without_transforms(facts, "an iterable dataset is not read again for that")
    if entry.subject is None:
        return _without_transforms(facts, "--no-probe")
    if facts.rank != 0:
        return _without_transforms(facts, "they are timed in rank 0")
    try:
        steps, batches, seconds = transforms_of(*entry.subject)
    except ProbeError as error:
        return _without_transforms(facts, str(error))
    how = f"transforms during the run: they were timed after it, alone, in {batches} batches over {seconds:.1f} s"
    return _with_transforms(facts, steps, how)


def _without_transforms(facts: Facts, why: str) -> Facts:
    return _with_transforms(facts, None, f"single transforms: {why}")


def _with_transforms(facts: Facts, transforms: tuple[TransformFacts, ...] | None, said: str) -> Facts:
    gaps = (*(gap for gap in facts.unmeasured if not gap.startswith("single transforms")), said)
    known = None if transforms is None else of_all(transforms, facts.pools.values())
    return replace(facts, transforms=known, unmeasured=gaps)


def _print(options: DiagnoseOptions, diagnosis: Diagnosis, *, is_first: bool) -> None:
    """The first loader's report, unless it is written; a line and the advice of the others. The advice is last."""
    command = _command(diagnosis.recommendation, options.again, diagnosis.facts.workers)
    if options.html or options.json or not is_first:
        facts = diagnosis.facts
        head = f"dpex diagnosis of {facts.name} ({facts.dataset}, batch size {facts.batch_size})"
        lines = wrapped(f"{head}: {diagnosis.verdict.title.upper()}: {diagnosis.verdict.sentence}")
        lines += wrapped(f"First: {diagnosis.advice}")
    else:
        lines = [diagnosis.full if options.full else str(diagnosis)]
    print("\n".join([*lines, *_asked(command)]), file=sys.stderr, flush=True)


def _asked(command: str) -> list[str]:
    return ["dpex finds that by itself, and keeps to it as the work changes:", f"  {command}"] if command else []


def _command(setting: Prediction | None, script: Sequence[str], workers: int) -> str:
    """The command that has the tuner find this setting; "" where it is none that the tuner sets."""
    if setting is None or setting.kind not in TUNERS or not setting.settings.workers:
        return ""
    return shlex.join(["dpex", "run", *([] if workers else ["--also-in-process"]), *script])


def _write(options: DiagnoseOptions, diagnosis: Diagnosis) -> None:
    for name, write in ((options.html, _html), (options.json, _json)):
        if name and (diagnosis.facts.rank == 0 or "{rank}" in name):
            path = free_path(name, diagnosis.facts.rank)
            try:
                path.write_text(write(options, diagnosis), encoding="utf-8", errors="backslashreplace")
            except OSError as error:
                print(f"dpex diagnose: {path} cannot be written: {error}", file=sys.stderr)


def _html(options: DiagnoseOptions, diagnosis: Diagnosis) -> str:
    return diagnosis.html(_asked(_command(diagnosis.recommendation, options.again, diagnosis.facts.workers)))


def _json(options: DiagnoseOptions, diagnosis: Diagnosis) -> str:
    """``with_dpex``: the setting that the tuner would find, with its rate and wait, and the command; None where there
    is none that is faster."""
    changes = diagnosis.what_if.predictions if diagnosis.what_if is not None else ()
    setting = next((one for one in changes if one.kind in TUNERS and one.settings.workers), None)
    known = diagnosis.verdict.cause not in ("too-early", "consumer")
    command = _command(setting, options.again, diagnosis.facts.workers) if known else ""
    found = None
    if command and setting is not None:
        found = {"settings": vars(setting.settings), "rate": setting.rate, "wait": setting.wait, "command": command}
    return json.dumps(diagnosis.to_dict() | {"with_dpex": found}, indent=2, allow_nan=False) + "\n"
