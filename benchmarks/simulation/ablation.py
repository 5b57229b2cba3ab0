"""The law with and without each GPU signal, in all worlds with a GPU: `python -m benchmarks.simulation.ablation`

A signal is taken away from the samples, so that the law is the same each time. The table is Markdown: for each
scenario and variant the regret, the workers above those needed (the mean in the calm part), and the decisions while
settling; of several intervals the worst. What misses its target is in bold.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import Pool

from benchmarks.simulation import kept
from benchmarks.simulation.scenarios import GPU, Scenario, load
from benchmarks.simulation.score import MOST_DECISIONS, MOST_REGRET, Result, cold_start, play
from dpex.autotune.law import Law, law_for
from dpex.autotune.types import Decision, Sample, Settings

MOST_SPARE = 1.0
"""Workers above the fewest that are nearly as fast as the best."""
_TOLERANCE = 0.005
Mask = Callable[[Sample], Sample]


def _without_nvml(sample: Sample) -> Sample:
    return replace(sample, gpu_busy=None)


def _without_events(sample: Sample) -> Sample:
    return replace(sample, gpu_stall_s=None, gpu_steps=0, gpu_step_s=0.0)


def _without_step(sample: Sample) -> Sample:
    """The stall is known, and a step is what it is for the training loop."""
    if sample.gpu_stall_s is None:
        return sample
    return replace(sample, gpu_steps=sample.batches, gpu_step_s=sample.work_s)


def _without_queue(sample: Sample) -> Sample:
    """How many batches are ready and in flight is not known."""
    return replace(sample, ready=0, in_flight=0)


def _without_both(sample: Sample) -> Sample:
    return _without_events(_without_nvml(sample))


def _with_all(sample: Sample) -> Sample:
    return sample


VARIANTS: Mapping[str, Mask] = {
    "all signals": _with_all,
    "without NVML": _without_nvml,
    "without the step on the stream": _without_step,
    "without the queue": _without_queue,
    "without events": _without_events,
    "the loop's wait alone": _without_both,
}


@dataclass(frozen=True)
class Masked:
    """A law that is shown less."""

    law: Law
    mask: Mask

    def begin(self) -> Settings:
        """See `Steering.begin`."""
        return self.law.begin()

    def step(self, sample: Sample) -> Decision | None:
        """See `Steering.step`."""
        return self.law.step(self.mask(sample))


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Of the worst interval. regret: a share; spare: workers above those needed; decisions: while settling."""

    regret: float
    spare: float
    decisions: int

    @classmethod
    def of(cls, result: Result) -> Figures:
        """Those of a scenario that was played."""
        scores = result.scores
        return cls(
            regret=max(score.regret for score in scores),
            spare=max(score.workers - score.cheapest.settings.workers for score in scores),
            decisions=result.decisions,
        )

    @property
    def missed(self) -> tuple[bool, bool, bool]:
        """Whether the targets are missed: throughput, workers, decisions."""
        return (
            self.regret > MOST_REGRET,
            self.spare > MOST_SPARE + _TOLERANCE,
            self.decisions > MOST_DECISIONS,
        )

    def __str__(self) -> str:
        texts = (f"{100 * max(0.0, self.regret):.1f} %", f"{self.spare:+.1f}", f"{self.decisions}")
        return ", ".join(f"**{text}**" if bad else text for text, bad in zip(texts, self.missed, strict=True))


def figures(scenario: Scenario, mask: Mask) -> Figures:
    """What a law achieves that is shown samples through ``mask``."""
    start = cold_start(scenario.world, scenario.config)
    steering = partial(_masked, scenario, start, mask)
    return Figures.of(play(scenario, kept.truths(GPU, scenario), steering))


def _masked(scenario: Scenario, start: Settings, mask: Mask) -> Masked:
    return Masked(law_for(scenario.config, start), mask)


def table(found: Mapping[str, Sequence[Figures]]) -> Iterator[str]:
    """The lines of the table: by scenario, the figures of each variant."""
    yield f"| scenario | {' | '.join(VARIANTS)} |"
    yield f"|---|{'---|' * len(VARIANTS)}"
    for name, row in found.items():
        yield f"| `{name}` | {' | '.join(map(str, row))} |"
    met = (sum(not any(row[at].missed) for row in found.values()) for at in range(len(VARIANTS)))
    yield f"| **all targets met** | {' | '.join(f'{count} of {len(found)}' for count in met)} |"


def _row(scenario: Scenario) -> list[Figures]:
    return [figures(scenario, mask) for mask in VARIANTS.values()]


def main() -> int:
    """The command."""
    scenarios = load(GPU)
    with Pool() as pool:
        rows = pool.map(_row, scenarios.values(), chunksize=1)
    for line in table(dict(zip(scenarios, rows, strict=True))):
        print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
