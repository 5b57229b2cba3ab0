"""Decide how many places to request beyond the size of a cluster, and when to give them back. PURE.

A place is room for one worker. A loader that could use more remote workers than fit in the cluster requests more
places. An autoscaler sees the pending placement groups and adds nodes. Training continues meanwhile. The tuner plans
with existing places, and a new place counts as free until the loader takes it.

Places are given back if they are no longer useful, if no node comes for them, or if the loader does not take them. In
the last two cases the user gets a message, and no places are requested during a pause.
"""

from __future__ import annotations

from dataclasses import dataclass

LACKING_S = 3.0
"""Seconds for which places must be lacking before any are requested, because a node costs money and the need that a
single window shows may be wrong."""
SPARE_S = 5.0
"""Seconds for which there must be spare places before they are given back, because the need of a loop varies by
window."""
NODE_S = 600.0
"""Seconds without a new place after which a request is given up. Clouds take one to five minutes to add a node."""
UNTAKEN_S = 30.0
"""Seconds for which new places may stay unused. The tuner decides within a few windows."""
PAUSE_S = 600.0
"""Seconds without new requests after places did not come or were not taken, because an unused node costs money."""


@dataclass(frozen=True, kw_only=True)
class Places:
    """The places of one loader on the cluster: ``held`` were added for it, and ``awaited`` are pending.

    ``useful``: remote workers that would speed up training, or None. ``requested``: remote workers that the loader has
    requested.
    """

    useful: int | None
    requested: int
    free: int
    held: int = 0
    awaited: int = 0


@dataclass(frozen=True, kw_only=True)
class DemandChange:
    """A decision: places to ``ask`` for, ``held`` and ``awaited`` places to give back, and a message to the user."""

    ask: int = 0
    held: int = 0
    awaited: int = 0
    message: str = ""


class _Lasting:
    """The minimum of a number since it rose above 0, if that was at least ``lasts_s`` seconds ago; else 0."""

    def __init__(self, lasts_s: float) -> None:
        self._lasts_s = lasts_s
        self._since: float | None = None
        self._least = 0

    def look(self, value: int, now: float) -> int:
        """Take in a value at ``now``. Return the minimum since the rise above 0 if that was long enough ago, else 0."""
        if value <= 0:
            self._since = None
            return 0
        if self._since is None:
            self._since, self._least = now, value
        self._least = min(self._least, value)
        if now - self._since < self._lasts_s:
            return 0
        self._since = None
        return self._least


class Demand:
    """Decides about requests for places. Times are seconds of one clock. Nothing is requested before
    ``pause_until``."""

    def __init__(self) -> None:
        self.pause_until: float = float("-inf")
        self._lacking = _Lasting(LACKING_S)
        self._spare = _Lasting(SPARE_S)
        self._requested = 0
        self._held = 0
        self._hoping_since = 0.0
        self._untaken_since = 0.0

    def look(self, places: Places, now: float) -> DemandChange:
        """Return a decision, which the caller carries out before the next call."""
        taken = min(places.held, max(0, places.requested - self._requested))
        self._requested = places.requested
        if places.held > self._held:
            self._hoping_since = now
            self._untaken_since = now if not self._held else self._untaken_since
        if taken:
            self._untaken_since = now
        held = self._held = places.held - taken
        given_up = self._given_up(held, places.awaited, now)
        if given_up is not None:
            self.pause_until, self._held = now + PAUSE_S, 0
            return DemandChange(held=places.held, awaited=places.awaited, message=given_up)
        if taken:  # pending places would get the room before the loader's own request; they are asked for again later
            return DemandChange(held=taken, awaited=places.awaited)
        return self._by_need(places, held, now)

    def _given_up(self, held: int, awaited: int, now: float) -> str | None:
        if held and now - self._untaken_since >= UNTAKEN_S:
            return (
                f"Gave back {_places(held)} on the cluster that came on request: they were not taken within "
                f"{UNTAKEN_S:.0f} s, as other changes were tried first or more workers did not help."
            )
        if awaited and now - self._hoping_since >= NODE_S:
            return (
                f"Gave back the request for {_places(awaited)} on the cluster: no node came for them within "
                f"{NODE_S:.0f} s. See the autoscaler's messages in `ray status`, or give a smaller max_remote."
            )
        return None

    def _by_need(self, places: Places, held: int, now: float) -> DemandChange:
        if places.useful is None or now < self.pause_until:
            return DemandChange()
        there = held + places.awaited
        missing = max(0, places.useful - places.requested - places.free) - there
        ask, spare = self._lacking.look(missing, now), self._spare.look(-missing, now)
        message = ""
        if ask and not places.awaited:
            self._hoping_since = now
            message = (
                f"Asked the cluster for {_places(ask)} beyond its size: {places.useful} remote workers would speed up "
                "training. Training continues while an autoscaler adds nodes."
            )
        awaited = min(places.awaited, spare)
        surplus = min(held, spare - awaited)
        self._held -= surplus
        return DemandChange(ask=ask, held=surplus, awaited=awaited, message=message)


def _places(count: int) -> str:
    return "1 place for a worker" if count == 1 else f"{count} places for workers"
