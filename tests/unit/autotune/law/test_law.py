"""What the law makes of work by formulae, through the tuner: how far it jumps, what it takes back, and that it ends."""

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from dpex.autotune.config import AutotuneConfig, limits_of
from dpex.autotune.constants import CONSTANTS
from dpex.autotune.law.law import initial_settings
from dpex.autotune.runtime.tuner import Tuner
from dpex.autotune.types import Decision
from dpex.measure.settings import Settings
from tests.unit.autotune.test_tuning import Loader, Machine, run, tuned


class TunedLoader:
    """A loader and its tuner. ``at_once``: a storage serves so many workers, the others wait for it."""

    tuner: Tuner
    engine: Loader

    def __init__(
        self,
        service_s: float,
        step_s: float = 0.01,
        *,
        cpus: float = 16.0,
        at_once: float = math.inf,
        cpu_s: float = 0.0,
    ) -> None:
        begin, self.machine = initial_settings(limits_of(AutotuneConfig()), cpus), Machine(cpus=cpus)
        self.tuner, self.engine = tuned(
            service_s=service_s, step_s=step_s, cpu_s=cpu_s, machine=self.machine, start=begin
        )
        self.engine.shared = at_once / service_s

    def run(self, seconds: float) -> list[Decision]:
        """Let time pass; the decisions meanwhile."""
        before = len(self.tuner.decisions)
        run(self.tuner, self.engine, seconds)
        return self.tuner.decisions[before:]

    @property
    def workers(self) -> int:
        return self.engine.settings.local


def test_it_starts_within_the_configuration() -> None:
    few, many = AutotuneConfig(max_local=3, max_prefetch=4), AutotuneConfig(min_local=2, min_remote=1)
    assert initial_settings(limits_of(few), 8.0) == Settings(local=3, prefetch=4)
    assert initial_settings(limits_of(many), 1.0) == Settings(local=2, remote=1, prefetch=6)


def test_a_jump_is_bounded() -> None:
    (first, *_) = TunedLoader(1.0).run(10.0)
    assert (first.reason, first.new.local) == ("too few", CONSTANTS.jump * 8)


def test_work_that_computes_gets_a_worker_for_each_of_many_cpus() -> None:
    loader = TunedLoader(1.0, 0.01, cpus=128.0, cpu_s=1.0)
    loader.run(120.0)
    assert AutotuneConfig().max_waiting < 100 <= loader.workers <= 128


def test_nothing_is_changed_where_the_loop_does_not_wait() -> None:
    assert {decision.reason for decision in TunedLoader(0.02, 0.02).run(60.0)} <= {"too many"}


def test_other_work_is_met_by_another_jump() -> None:
    loader = TunedLoader(0.1, 0.02)
    loader.run(30.0)
    few, loader.engine.step_s = loader.workers, 0.005
    most = max(decision.new.local for decision in loader.run(10.0))
    assert few < most <= math.ceil(AutotuneConfig().headroom * 0.1 / 0.005) + 1


def test_growth_that_only_makes_batches_slower_is_taken_back() -> None:
    """A storage that serves eight readers at once: with 32 each batch takes four times as long."""
    loader = TunedLoader(0.5, at_once=8.0)
    decisions = loader.run(30.0)
    assert [decision.reason for decision in decisions[:2]] == ["too few", "undo"]
    outcome = loader.tuner.decisions[0].outcome
    assert outcome is not None
    assert not outcome.kept
    assert decisions[1].new.local < 12


def test_an_undone_growth_is_retried_smaller_after_a_pause() -> None:
    loader = TunedLoader(0.5, at_once=8.0)
    (grown, undone, *_) = loader.run(30.0)
    again = next(decision for decision in loader.run(600.0) if decision.new.local > decision.old.local)
    assert again.at - undone.at > CONSTANTS.pause * (undone.at - grown.at)
    assert again.new.local <= math.ceil(math.sqrt(undone.new.local * grown.new.local))


def test_going_back_again_and_again_adds_no_worker() -> None:
    """A storage that serves six readers at once: 64 workers, and each smaller number after them, are no faster."""
    loader = TunedLoader(0.0859, 0.001, cpus=2.0, at_once=6.0)
    back = [decision.new.local for decision in loader.run(240.0) if decision.reason == "undo"]
    assert len(back) > 2
    assert set(back) == {16}


def test_growth_by_less_than_windows_can_show_is_none() -> None:
    tuner, engine = tuned(AutotuneConfig(max_local=33), service_s=1.0, start=Settings(local=32, prefetch=256))
    run(tuner, engine, 30.0)
    assert "too few" not in {decision.reason for decision in tuner.decisions}


def test_growth_is_kept_once_each_worker_has_made_a_batch() -> None:
    """Workers make a batch, then another one that counts, and no windows wait for a third."""
    (first, second, *_) = TunedLoader(0.25, 0.0001, cpus=2.0).run(10.0)
    assert (first.new.local, second.new.local) == (16, 64)
    assert second.at - first.at < 4 * 0.25


def grown(service_s: float) -> TunedLoader:
    """One whose workers have just become more."""
    loader = TunedLoader(service_s)
    while loader.workers == 8:
        loader.run(0.1)
    return loader


def test_growth_after_which_no_batch_is_made_is_taken_back() -> None:
    """With so many readers no batch is made."""
    loader = grown(0.5)
    loader.engine.service_s = 1e6
    (ended, *_) = loader.run(60.0)
    assert (ended.reason, ended.new.local) == ("undo", 8)


def test_going_back_is_taken_back_if_it_was_worse() -> None:
    """Batches get slower at the very moment of the growth, and stay so: it was not to blame."""
    loader = grown(0.3)
    many, loader.engine.service_s = loader.workers, 12 * 0.3
    loader.run(120.0)
    assert loader.workers >= many


def test_work_that_changes_during_growth_ends_its_trial() -> None:
    """Growth of 8 workers to 32 can make batches four times slower, and they are 12 times slower: other work."""
    loader = grown(0.3)
    many, loader.engine.service_s = loader.workers, 12 * 0.3
    decisions = loader.run(20.0)
    assert {decision.reason for decision in decisions} == {"too few"}
    assert loader.workers > many
    outcome = loader.tuner.decisions[0].outcome
    assert outcome is not None
    assert outcome.kept


def test_growth_that_was_not_to_blame_is_no_failure() -> None:
    """Batches are as slow without it, so the work is another: the next growth neither waits nor goes half-way."""
    loader = grown(0.3)
    many, loader.engine.service_s = loader.workers, 4 * 0.3
    decisions = loader.run(20.0)
    assert [decision.reason for decision in decisions[:2]] == ["undo", "too few"]
    assert decisions[1].new.local == many < loader.workers


def test_a_release_that_was_reversed_delays_the_next_release() -> None:
    def given_back_after_s(loader: TunedLoader) -> float:
        began, loader.engine.step_s = loader.engine.clock(), 0.05
        while loader.workers > 4:
            loader.run(0.5)
        return loader.engine.clock() - began

    loader = TunedLoader(0.1)
    loader.run(10.0)
    first_s = given_back_after_s(loader)
    for _ in range(3):
        loader.engine.step_s = 0.01
        loader.run(10.0)
        assert loader.workers > 8
        last_s = given_back_after_s(loader)
    assert last_s > 2 * first_s


def test_limits_hold_at_once() -> None:
    loader = TunedLoader(1.0)
    loader.run(10.0)
    many = loader.workers
    assert many > 20
    loader.machine.known |= {"memory_free": -(10**9), "worker_bytes": 1e8}
    (first, *_) = loader.run(2.0)
    assert first.reason == "limit"
    assert first.new.local <= many - 10


@given(
    service_s=st.floats(0.002, 2.0),
    step_s=st.floats(0.001, 1.0),
    cpus=st.integers(1, 64),
    at_once=st.floats(1.0, 128.0),
)
@settings(max_examples=8, deadline=None)
def test_it_settles(service_s: float, step_s: float, cpus: int, at_once: float) -> None:
    """What failed is tried again ever later: growth, a probe, and the way back from either."""
    loader = TunedLoader(service_s, step_s, cpus=float(cpus), at_once=at_once)
    loader.run(120.0)
    assert len(loader.run(60.0)) <= 4
