"""Keeps what ``dpex diagnose`` counted of each loader, and prints or writes it when the process ends.

A loader that is made anew for each pass, with the same kind of dataset, batch size and workers, is one loader here.
Nothing that goes wrong here ends or changes a run.
"""

from __future__ import annotations

import json
import os
import sys
import weakref
from dataclasses import dataclass, field, replace
from typing import Any

from dpex._torch import DatasetKind
from dpex.autotune.runtime.recorder import rank
from dpex.diagnose.at_exit import free_path
from dpex.diagnose.counters import LoaderCounters
from dpex.diagnose.diagnosis import Diagnosis, diagnose
from dpex.diagnose.facts import Facts, TransformFacts, of_all
from dpex.diagnose.gathered import Context, facts_of
from dpex.diagnose.report import wrapped
from dpex.dropin.options import DiagnoseOptions
from dpex.dropin.stock.probe import ProbeError, transforms_of
from dpex.dropin.stock.projection import WithDpex, with_dpex
from dpex.system.html_page import write_text

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
        is_fixed=loader.num_workers > 0,
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
        ours = with_dpex(diagnosis, entry.options.again, is_stream=entry.is_stream)
        _write(entry.options, diagnosis, ours)
        if facts.rank == 0 and number <= _SHOWN:
            _print(entry.options, diagnosis, ours, in_full=is_first)


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


def _print(options: DiagnoseOptions, diagnosis: Diagnosis, ours: WithDpex, *, in_full: bool) -> None:
    lines = [*wrapped(ours.sentence), *([f"  {ours.command}"] if ours.command else [])]
    if options.html or options.json or not in_full:
        facts = diagnosis.facts
        head = f"dpex diagnosis of {facts.name} ({facts.dataset}, batch size {facts.batch_size})"
        lines = [*wrapped(f"{head}: {diagnosis.verdict.title.upper()}: {diagnosis.verdict.sentence}"), *lines]
    else:
        lines = [str(diagnosis), "", *lines]
    print("\n".join(lines), file=sys.stderr, flush=True)


def _write(options: DiagnoseOptions, diagnosis: Diagnosis, ours: WithDpex) -> None:
    for name, write in ((options.html, _html), (options.json, _json)):
        if name and (diagnosis.facts.rank == 0 or "{rank}" in name):
            path = free_path(name, diagnosis.facts.rank)
            try:
                write_text(path, write(diagnosis, ours))
            except OSError as error:
                print(f"dpex diagnose: {path} cannot be written: {error}", file=sys.stderr)


def _html(diagnosis: Diagnosis, ours: WithDpex) -> str:
    return diagnosis.html(tuple(line for line in (ours.sentence, ours.command) if line))


def _json(diagnosis: Diagnosis, ours: WithDpex) -> str:
    return json.dumps(diagnosis.to_dict() | {"with_dpex": ours.to_dict()}, indent=2, allow_nan=False) + "\n"
