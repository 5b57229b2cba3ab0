"""What to expect of the best settings: with a reserve while costs are uncertain, and never less than they may need."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dpex.autotune.config import AutotuneConfig
from dpex.autotune.model import Estimate
from dpex.autotune.outlook import Thinker
from dpex.autotune.planner import Bounds, best
from dpex.autotune.types import Settings

CONFIG = AutotuneConfig()
WORK = Estimate(step_s=0.01, step_cpu_s=0.0, own_s=0.0, here_s=0.1, cpu_s=0.001, wait_s=0.099, far_s=0.1, cpus=16.0)
DEARER = replace(WORK, cpu_s=0.0014, wait_s=0.1386, here_s=0.14, far_s=0.14)
ROOM = Bounds(local=64, remote=0, prefetch=4096)


def wanted(now: int, dearer: Estimate = DEARER, bounds: Bounds = ROOM) -> Settings:
    thinker = Thinker(CONFIG)
    return thinker.think(WORK, dearer, bounds, Settings(local=now, prefetch=2 * now), WORK.variation).best.settings


def test_growth_is_enough_for_batches_as_dear_as_they_may_be() -> None:
    assert wanted(2).local == best(DEARER, ROOM, CONFIG).settings.local > best(WORK, ROOM, CONFIG).settings.local


def test_costs_that_are_known_need_no_reserve() -> None:
    assert wanted(2, WORK).local == best(WORK, ROOM, CONFIG).settings.local


def test_there_is_no_reserve_beyond_the_bounds() -> None:
    assert wanted(2, bounds=replace(ROOM, local=12)).local == 12


@pytest.mark.parametrize("now", [15, 64])
def test_what_there_is_is_given_back_as_far_as_dearer_batches_allow(now: int) -> None:
    assert wanted(now).local == best(DEARER, ROOM, CONFIG).settings.local
