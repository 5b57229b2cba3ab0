"""Sentences on how to end the stall. Pure."""

from __future__ import annotations

import math

from dpex.autotune.law.model import EndOfStall, Model
from dpex.diagnose import work
from dpex.diagnose.attribution import LostTime
from dpex.diagnose.facts import Facts
from dpex.measure.readable import duration, percent, rounded

STALLS = 0.05
"""From this share of the time on, waited or held up, there is a stall to end."""
_TOLD = 0.05
"""Part of all CPUs from which those of other programs are mentioned."""
_ENOUGH = 0.05
"""CPUs that miss less than this part of what is needed are enough: measurements are no better."""


def sentences(facts: Facts, found: LostTime, model: Model) -> str:
    """Return the rate that the training loop could take, and its needs; "" where nothing stalls or little is known."""
    if max(facts.running_wait_ratio, facts.held_ratio) < STALLS:
        return ""
    end = model.to_end_stall()
    who = "training loop" if facts.gpu_stall_s is None else "GPU"
    needs = _needs(facts, found, model, end)
    return f"The {who} could take {rounded(end.rate)} batches/s. {needs}" if needs else ""


def _needs(facts: Facts, found: LostTime, model: Model, end: EndOfStall) -> str:
    first = found.ranked[0][0]
    if first in ("transfer", "sampler", "dispatch", "unknown"):
        return ""
    if end.more_cpus > _ENOUGH * end.cpus and not model.now.remote:
        return _cpus(facts, end) + _costliest(end)
    if first in ("straggler", "memory"):
        return _prefetch(facts, model)
    if first in ("startup", "crowding"):
        return ""
    if end.workers > model.now.workers:
        return f"That needs {end.workers} workers; {model.now.workers or 'none'} ran." + _costliest(end)
    return ""


def _cpus(facts: Facts, end: EndOfStall) -> str:
    beside = facts.others or 0.0
    others = f", of which other programs use {beside:.2g}" if beside >= _TOLD * facts.cpus else ""
    more, needed = max(1, math.ceil(end.more_cpus - _TOLD)), math.ceil(end.cpus - _TOLD)
    cost = f", or samples at {percent(end.cost)} of their cost," if end.cost >= _TOLD else ""
    return (
        f"That needs {needed} CPU{'s' * (needed > 1)}; this machine has {rounded(facts.cpus)}{others}. "
        f"{more} more CPU{'s' * (more > 1)} on other nodes{cost} would end the stall."
    )


def _costliest(end: EndOfStall) -> str:
    names = {"load": "getting the samples", "collate": "the collate function", "encode": "writing batches into memory"}
    if end.stage is None:
        return ""
    name, share = end.stage
    return f" The costliest part is {names.get(name, f'`{name}`')} ({percent(share)})."


def _prefetch(facts: Facts, model: Model) -> str:
    """Batches in flight that the other workers make while the slowest is made."""
    needed = work.covering_prefetch(facts, model)
    if needed <= model.now.prefetch:
        return ""
    slowest = duration(max(work.services(facts), default=0.0))
    return (
        f"The slowest batch takes {slowest}: that needs at least {needed} batches in flight instead of "
        f"{model.now.prefetch}, or no such batches."
    )
