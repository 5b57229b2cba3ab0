"""Rates that were seen not to be surpassed: for how long they are believed, and what disproves them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from dpex.autotune.ceiling import Ceiling, Ceilings
from dpex.autotune.types import Sample, Settings
from dpex.autotune.window_record import WindowRecord
from dpex.measure.samples import PoolSample

FOUR = PoolSample(requested=4, running=4, tickets=20, load_s=2.0)


def test_a_ceiling_that_is_found_again_is_believed_for_longer() -> None:
    ceiling = Ceiling(60.0)
    ceiling.learn(10.0, 0.0)
    assert (ceiling.at(59.0), ceiling.at(60.0)) == (10.0, math.inf)
    ceiling.learn(10.0, 100.0)
    assert (ceiling.at(219.0), ceiling.at(220.0)) == (10.0, math.inf)
    ceiling.forget()
    ceiling.learn(0.0, 300.0)
    assert ceiling.at(300.0) == math.inf  # windows without a batch show no rate


@pytest.mark.parametrize(("tickets", "is_known"), [(20, True), (22, True), (26, False), (12, True)])
def test_a_link_that_carries_more_than_was_believed_is_not_full(tickets: int, is_known: bool) -> None:
    ceilings, record = Ceilings(60.0), WindowRecord()
    ceilings.link.learn(20.0 if tickets > 12 else 2.0, 0.0)
    remote = replace(FOUR, tickets=tickets)
    sample = Sample(at=1.0, seconds=1.0, settings=Settings(remote=4), batches=tickets, wait_s=0.9, remote=remote)
    record.add(sample, 0.9)
    ceilings.look(sample, record, usual_s=0.1)
    assert ceilings.link.is_known(1.0) is is_known


@pytest.mark.parametrize(("batches", "is_known"), [(22, True), (24, False)])
def test_a_ceiling_that_is_clearly_surpassed_is_none(batches: int, is_known: bool) -> None:
    ceilings, record = Ceilings(60.0), WindowRecord()
    ceilings.all.learn(20.0, 0.0)
    sample = Sample(at=1.0, seconds=1.0, settings=Settings(local=4), batches=batches, wait_s=0.9, local=FOUR)
    for _ in range(4):
        record.add(sample, 0.9)
    ceilings.look(sample, record, usual_s=0.1)
    assert ceilings.all.is_known(1.0) is is_known
