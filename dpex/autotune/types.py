"""Policies, decisions, and the room of a cluster. Times are seconds, sizes bytes, rates per second.

A policy sees windows (`Reading`). A legal window has only possible numbers: finite, and 0 or more except for free
memory. ``at`` never goes back. Any number may jump from one window to the next, and a time is 0 where a clock stood
still. An unknown value is 0 where the type does not allow None. Free memory and room may fall to 0. The law takes any
sequence of legal windows and raises nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, Protocol

from dpex.measure.reading import Reading, Signal
from dpex.measure.settings import Settings

if TYPE_CHECKING:
    from dpex.autotune.limits import Limits


Reason = Literal["start", "too few", "too many", "spread", "explore", "undo", "limit", "demand", "failed"]
"""The reason of a decision. "spread" is for a larger prefetch, "explore" for a trial without a prediction, "demand" for
a request to the cluster, "failed" for an error in the tuner."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The effect of a decision, measured once the new workers ran.

    Attributes:
        rate: Batches per second.
        wait: The share of the training loop's time that was lost to loading, from 0 to 1. It includes the training
            thread's waits for a CPU.
        kept: True if the change was kept, False if it was undone.
        at: Time of the conclusion, in seconds since the loader's first `iter()`.
    """

    rate: float
    wait: float
    kept: bool
    at: float


@dataclass(frozen=True, kw_only=True)
class Decision:
    """A change of settings, with its reason, its evidence and its expected effect.

    Attributes:
        at: Time of the decision, in seconds since the loader's first `iter()`.
        old: The previous settings.
        new: The new settings.
        reason: The reason in one word.
        text: The decision in sentences.
        evidence: The measurements, by name. "rate" is missing if they cover less than 3 mean batch times.
        predicted_rate: Expected batches per second.
        predicted_wait: Expected share of the training loop's time lost to loading, from 0 to 1.
        outcome: The effect; None until it is measured.
        signal: The measure of loading. "events": the time that the GPU's stream waited for data, by CUDA events.
            "nvml": the time in which the GPU ran no kernel and the training loop waited. "wait": the time that the
            training loop waited, if no GPU is known. Times and shares are the GPU's if a GPU is known.
    """

    at: float
    old: Settings
    new: Settings
    reason: Reason
    text: str
    evidence: Mapping[str, float]
    predicted_rate: float
    predicted_wait: float
    outcome: Outcome | None = None
    signal: Signal = "wait"

    @classmethod
    def to(
        cls,
        window: Reading,
        new: Settings,
        reason: Reason,
        *,
        rate: float = 0.0,
        wait: float = 0.0,
        evidence: Mapping[str, float] = MappingProxyType({}),
        text: str = "",
    ) -> Decision:
        """Return the decision for ``new`` at the end of a window.

        Args:
            window: The latest window.
            new: The wanted settings. The tuner clips them to the limits.
            reason: The reason in one word. "undo" marks the outcome of the policy's previous decision as not kept.
            rate: Expected batches per second; 0 without a prediction.
            wait: Expected share of the training loop's time lost to loading.
            evidence: The measurements that led to the decision, by name.
            text: The decision in sentences. "": dpex writes them.
        """
        return cls(
            at=window.at,
            old=window.settings,
            new=new,
            reason=reason,
            text=text,
            evidence=dict(evidence),
            predicted_rate=rate,
            predicted_wait=wait,
            signal=window.signal,
        )


class Policy(Protocol):
    """Chooses the settings of a loader from windows of measurements.

    ``AutotuneConfig(policy=...)`` takes a class or a function that returns a policy for a configuration
    (`AutotuneConfig`), the settings to begin with (`Settings`) and the limits (`dpex.autotune.limits.Limits`). dpex
    makes a new policy if limits change, for instance by `resize()`. A policy needs no base class. It knows time only
    from windows, and starts no thread.

    dpex drops windows that measured nothing, judges waiting by the GPU's clock if it can, keeps the limits of memory,
    cluster and user, and writes the outcome of each decision.
    """

    def observe(self, window: Reading, limits: Limits) -> Decision | None:
        """Take in a window; return `Decision.to(window, settings, reason)`, or None to stay.

        Args:
            window: The `dpex.measure.reading.Reading` of the window: ``rate`` (batches per second), ``wait`` (the share
                of the time that was lost to loading), ``seconds``, ``at`` (seconds since the loader's first `iter()`),
                ``settings`` (in force), and ``local`` and ``remote``, the counts of the worker pools.
            limits: The limits in this window. The tuner clips each wish to them.
        """


# -- room on a cluster -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RoomWanted:
    """A loader's demand on a cluster.

    Attributes:
        requested: Requested workers.
        running: Running workers.
        useful: Workers that would speed up training; None if unknown.
        may_grow: True if the loader may ask for new nodes.
    """

    requested: int
    running: int
    useful: int | None = None
    may_grow: bool = False


@dataclass(frozen=True, kw_only=True)
class RoomFound:
    """The room that a cluster has for a loader.

    Attributes:
        more: Workers that the loader can get beyond the requested ones.
        unplaced: Requested workers that the cluster has no room for.
        granted: The loader's share in workers, or None.
        message: The result of a request for nodes, for the user, or "".
    """

    more: int
    unplaced: int = 0
    granted: int | None = None
    message: str = ""


class Room(Protocol):
    """A source of room for remote workers. Both methods may be slow."""

    def find(self, wanted: RoomWanted) -> RoomFound | None:
        """Return the room of this loader; None if remote workers are impossible."""

    def rest(self) -> None:
        """Release reservations that no worker uses, because the loader is not in use."""


def room_found(wanted: RoomWanted, free: int, capacity: int, granted: int | None, message: str = "") -> RoomFound:
    """Return the room of a loader on a cluster with places for ``free`` more workers, and ``capacity`` in all."""
    most = capacity if granted is None else min(capacity, granted)
    return RoomFound(
        more=max(0, min(free, most - wanted.requested)),
        unplaced=max(0, min(wanted.requested - wanted.running, wanted.requested - capacity)),
        granted=granted,
        message=message,
    )
