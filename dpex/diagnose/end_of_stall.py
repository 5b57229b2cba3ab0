"""Sentences on the rate that the training loop could take, and on the CPUs or workers for that rate. Pure."""

from __future__ import annotations

import math

from dpex.autotune.law.model import EndOfStall, Model
from dpex.diagnose.facts import Facts
from dpex.diagnose.work import costliest
from dpex.measure.causes import CAUSES, LostTime
from dpex.measure.readable import percent, plural, rounded

MATTERS = 0.05
"""Minimum share, of time or of CPUs, that is worth a change."""
_TOLD = 0.05
"""Other programs are mentioned if they use at least this share of the CPUs."""
_ENOUGH = 0.05
"""CPUs suffice if less than this share of the needed CPUs is missing, because measurements are no more precise."""
_STAGES = {"load": "the dataset", "collate": "the collate function", "encode": "writing batches into memory"}
"""Texts for the stages of a batch. All other names of costly parts are already texts of calls."""


def stage_name(name: str) -> str:
    """Return the words for a stage or a call."""
    return _STAGES.get(name, name)


def end_of_stall(facts: Facts, found: LostTime, model: Model) -> str:
    """Return the rate that the training loop could take, and the CPUs or workers that it needs, in sentences.

    Return "" if there is no stall, or if more CPUs or workers would not end it.
    """
    end, first = model.to_end_stall(), CAUSES[found.ranked[0][0]]
    if max(facts.running_wait_ratio, facts.held_ratio) < MATTERS:
        return ""
    if first.is_loop:
        return ""
    if end.more_cpus > _ENOUGH * end.cpus and not model.now.remote:
        needs = _cpus(facts, end)
    elif first.is_making and end.workers > model.now.workers:
        what = "stream" if facts.keeps_workers else "worker"
        named = f", of {plural(facts.shards, 'shard')}" if facts.keeps_workers and facts.shards else ""
        needs = f"That needs {plural(end.workers, what)}; {model.now.workers or 'none'} ran{named}."
    else:
        return ""
    who = "training loop" if facts.gpu_running_stall_s is None else "GPU"
    told = f"The {who} could take {rounded(end.rate)} batches/s. {needs}"
    stage = costliest(facts)
    return told if stage is None else f"{told} The costliest part is {stage_name(stage[0])} ({percent(stage[1])})."


def _cpus(facts: Facts, end: EndOfStall) -> str:
    beside = facts.others or 0.0
    others = f", of which other programs use {beside:.2g}" if beside >= _TOLD * facts.cpus else ""
    more, needed = max(1, math.ceil(end.more_cpus - _TOLD)), math.ceil(end.cpus - _TOLD)
    cost = f", or samples at {percent(end.cost)} of their cost," if end.cost >= _TOLD else ""
    return (
        f"That needs {needed} CPU{'s' * (needed > 1)}; this machine has {rounded(facts.cpus)}{others}. "
        f"{more} more CPU{'s' * (more > 1)} on other nodes{cost} would end the stall."
    )
