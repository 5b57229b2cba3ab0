"""What the law decides in simulated worlds, on virtual time: the step of its decisions, and what it expects."""

import pytest

from benchmarks.simulation.generate import generate
from benchmarks.simulation.score import cold_start
from benchmarks.simulation.simulator import simulate
from benchmarks.simulation.world import Phase, Step, Work, World
from dpex.autotune.config import AutotuneConfig
from dpex.autotune.runtime.tuned import Tuned
from dpex.autotune.supervisor import Supervisor
from dpex.autotune.types import Decision
from dpex.schedule.prefetch import Settings

OWN_S = 0.0003


def decisions(*phases: Phase, seconds: float = 5.0) -> list[Decision]:
    """The decisions on two CPUs."""
    world = World(cpus=2.0, own_s=OWN_S, phases=phases)
    law = Supervisor(AutotuneConfig(), cold_start(world))
    simulate(world, [law], seconds, AutotuneConfig().interval_s)
    return law.decisions


@pytest.mark.parametrize(("step_s", "workers"), [(0.05, 4), (0.02, 10), (0.1, 2)])
def test_the_first_decision_reports_the_step_as_it_is(step_s: float, workers: int) -> None:
    """Few batches are known then, and the window ends in the middle of a step."""
    work = Work(wait_s=0.16)
    first = next(iter(decisions(Phase(work=work, step=Step(gpu_s=step_s)))), None)
    if first is None:
        assert workers == 2  # those that it began with
        return
    assert first.evidence["step_s"] == pytest.approx(step_s + OWN_S, rel=1e-6)
    assert first.new.local == workers
    assert first.predicted_rate == pytest.approx(1.0 / (step_s + OWN_S), rel=1e-6)


@pytest.mark.parametrize("waits_s", [(0.016, 0.128, 0.032), (0.128, 0.016, 0.128), (0.042, 0.15, 0.042)])
@pytest.mark.parametrize("changed_at", [0.45, 0.6, 0.9, 1.5, 2.0])
def test_no_growth_is_taken_back_as_work_changes(waits_s: tuple[float, ...], changed_at: float) -> None:
    """Eight workers are enough for the slowest of these works, and more never make a batch slower."""
    found = decisions(
        *(
            Phase(at=number * changed_at, work=Work(wait_s=wait_s), step=Step(gpu_s=0.02))
            for number, wait_s in enumerate(waits_s)
        ),
        seconds=3 * changed_at + 3.0,
    )
    assert "undo" not in {decision.reason for decision in found}
    assert max(decision.new.local for decision in found) <= 10


@pytest.mark.parametrize(("given", "reasons"), [(None, {"too few"}), (Tuned(local=2, prefetch=64), set())])
def test_a_start_from_another_run_is_left_for_windows_only(given: Tuned | None, reasons: set[str]) -> None:
    """Two workers are enough. The first batches take up to five times the mean, and the queue is empty at first."""
    phase = Phase(work=Work(wait_s=0.04, spread=0.8), step=Step(gpu_s=0.02))
    world = World(cpus=8, noise=0.02, phases=(phase,))
    law = Supervisor(AutotuneConfig(start=given), Settings(local=2, prefetch=64))
    simulate(world, [law], 1.0)
    assert {decision.reason for decision in law.decisions} == reasons


def test_batches_that_were_ready_are_no_rate_to_compare_with() -> None:
    """In world 307:9, batches of 4 s take 23 s from 300 s on. The last window before the growth has 3.3 batches/s."""
    world = generate(307, 9).world
    laws = [Supervisor(AutotuneConfig(), cold_start(world)) for _ in range(world.ranks)]
    simulate(world, laws, 400.0)
    for law in laws:
        assert "undo" not in {decision.reason for decision in law.decisions}
        assert law.decisions[-1].new.local > 60
