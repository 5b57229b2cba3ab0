"""An engine's state on fake pools, driven as the engine drives it, in steps that a test chooses."""

from collections.abc import Iterator
from typing import Any

from fake_pool import FakePool

from dpex.engine.pools import Pools
from dpex.measure.settings import Settings
from dpex.schedule.engine_state import EngineState
from dpex.schedule.prefetch import PrefetchRules
from dpex.schedule.progress import ResumePoint

NOTHING = object()


class Driver:
    """``said`` and ``pools`` are as the performer left them; ``now`` is the time of every event."""

    def __init__(
        self,
        *,
        logicals: int = 0,
        iterable: bool = False,
        in_order: bool = True,
        prefetch: int = 8,
        local: int = 2,
        remote: int = 0,
        **pool: Any,
    ) -> None:
        self.options = {"shared": not logicals, **pool}
        self.now, self.prefetch = 0.0, prefetch
        rules = PrefetchRules(logical=logicals > 0, may_group=False, memory_budget=None)
        self.state = EngineState(
            logicals=logicals, iterable=iterable, in_order=in_order, rules=rules, settings=self.settings(local, remote)
        )
        self.performer = Pools(self.state, self.make_pool)
        self.pools: dict[str, FakePool] = self.performer.by_name  # type: ignore[assignment]
        self.sampler: Iterator[Any] = iter(())
        self.perform(self.state.placement.request_start())

    def make_pool(self, name: str, count: int) -> FakePool:
        pool = FakePool(name, **self.options)
        pool.resize(count)
        return pool

    def settings(self, local: int, remote: int) -> Settings:
        return Settings(local=local, remote=remote, prefetch=self.prefetch)

    def perform(self, _: None = None) -> None:
        """Perform what the call in the brackets has left among the instructions."""
        self.performer.perform()

    def tell(self, event: Any) -> None:
        self.perform(self.state.apply_event(event, self.now))

    def begin(self, count: int = 20, point: ResumePoint | None = None) -> None:
        """Begin an epoch of ``count`` batches. It resumes at ``point``, with a sampler that begins there."""
        self.sampler = iter(range(0 if point is None else point.first, count))
        self.perform(self.state.begin_epoch(point, self.now))
        if point is not None and point.ahead:
            self._pass_over(point.ahead)
        self.fill()

    def _pass_over(self, ahead: frozenset[int]) -> None:
        """Draw up to the last of these tickets, which were delivered before; the others are to be made."""
        schedule = self.state.schedule
        prefetch = schedule.prefetch
        schedule.set_prefetch(prefetch + max(ahead) - schedule.drawn + 1)
        while schedule.drawn <= max(ahead):
            (schedule.pass_over if schedule.drawn in ahead else schedule.draw)(next(self.sampler))
        schedule.set_prefetch(prefetch)
        self.state.all_queues_are_dirty()

    def fill(self, *, starving: bool = False) -> None:
        for _ in range(self.state.room(starving)):
            index = next(self.sampler, NOTHING)
            if index is NOTHING:
                self.state.schedule.end_sampler()
                break
            self.state.placement.dirty.add(self.state.schedule.draw(index).queue)
        if self.state.has_to_send(starving):
            self.perform(self.state.issue(self.now, starving=starving))

    def collect(self) -> None:
        """Take in what the pools tell, and send what can be sent then."""
        for name, pool in self.pools.items():
            events = pool.poll()
            self.performer.report(name)
            while events:
                self.state.apply_event(events.popleft(), self.now)
        self.performer.perform()
        self.fill(starving=not self.state.schedule.ready)

    def resize(self, local: int, remote: int = 0) -> None:
        self.perform(self.state.resize(self.settings(local, remote)))
        self.state.settle_prefetch()
        self.fill()

    def take(self) -> Any:
        """The next batch, or `NOTHING`."""
        delivery = self.state.schedule.pop()
        self.fill()
        return NOTHING if delivery is None else delivery.payload()

    def work(self) -> None:
        """Let all pools do all that they have to do."""
        for pool in self.pools.values():
            pool.start()
            pool.work()
        self.collect()

    def finish(self) -> list[Any]:
        """The rest of the epoch's batches; never more turns than batches and moves could need."""
        batches = []
        for _ in range(1000):
            batch = self.take()
            if batch is not NOTHING:
                batches.append(batch)
            elif self.state.schedule.finished:
                return batches
            else:
                self.now += 1.0
                self.fill(starving=True)
                self.work()
        raise AssertionError(f"the epoch does not end: {vars(self.state.schedule)}")
