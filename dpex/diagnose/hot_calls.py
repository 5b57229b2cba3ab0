"""The calls that take most of the time of making a batch, with the lines of the user's code that make them. Pure.

The search finds the deepest call with at least `LEAST` of a batch's time. It reports the outermost caller that does
hardly anything else, but goes no further than a call in the user's own code.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dpex.diagnose.facts import CallFacts, Facts
from dpex.measure.batch_times import COLLATE, LOAD, OWN_CODE, WITHIN
from dpex.measure.readable import percent

LEAST = 0.1
"""Minimum share of the time of making a batch for a call to be reported."""
_NEARLY_ALL, _SAME, _SAME_FUNCTION = 0.85, 0.97, 0.8
"""Shares of a call in its caller's time. From `_NEARLY_ALL` on, the search enters a call inside a library. From `_SAME`
on, the caller is reported instead. `_SAME_FUNCTION` is `_SAME` for the innermost call, often C code behind a method."""
_HALF = 0.5
AWAIT = "await"
_PLACED = re.compile(r"(.*) ([(\[].+:[\d-]+[)\]])")


class CallBranch:
    """A call in the call tree, with its nested calls.

    Attributes:
        fact: The measurements of the call.
        name, place: The function, and the place of the call in the format of `dpex.profile.call_names.place`.
        all_wall_s, all_cpu_s: Seconds in all batches, including nested calls.
        wall_s, cpu_s: Seconds in the timed batches, including nested calls.
        leads_to_user: True if this call, or a nested call, is in the user's own code.
    """

    def __init__(self, fact: CallFacts, caller: CallBranch | None) -> None:
        self.fact: CallFacts = fact
        self.caller: CallBranch | None = caller
        shown = fact.name.rpartition(WITHIN)[2]
        placed = _PLACED.fullmatch(shown)
        self.name: str = placed[1] if placed else shown
        self.place: str = placed[2] if placed else ""
        self.within: list[CallBranch] = []
        self.all_wall_s: float = fact.all_wall_s
        self.all_cpu_s: float = fact.all_cpu_s
        self.wall_s: float = fact.wall_s
        self.cpu_s: float = fact.cpu_s
        self.leads_to_user: bool = self.is_of_user

    def add(self, one: CallBranch) -> None:
        """Add the seconds of a nested call, which must already include its own nested calls."""
        self.all_wall_s, self.all_cpu_s = self.all_wall_s + one.all_wall_s, self.all_cpu_s + one.all_cpu_s
        self.wall_s, self.cpu_s = self.wall_s + one.wall_s, self.cpu_s + one.cpu_s
        self.leads_to_user |= one.leads_to_user

    def walk(self) -> Iterator[CallBranch]:
        """Yield this call and its nested calls, in the order in which they first ran."""
        yield self
        for one in self.within:
            yield from one.walk()

    @property
    def is_of_user(self) -> bool:
        """True if the call is in the user's own code."""
        return self.place.startswith("(")

    @property
    def around(self) -> Iterator[CallBranch]:
        """Yield this call and its callers, innermost first."""
        one: CallBranch | None = self
        while one is not None:
            yield one
            one = one.caller


def trees(facts: Facts) -> tuple[CallBranch, ...]:
    """Return the trees of loading and of collating, as far as calls were timed."""
    known: dict[str, CallBranch] = {}
    for fact in sorted(facts.calls, key=lambda one: one.name.count(WITHIN)):
        caller = known.get(fact.name.rpartition(WITHIN)[0])
        known[fact.name] = CallBranch(fact, caller)
        if caller is not None:
            caller.within.append(known[fact.name])
    for one in reversed(known.values()):
        if one.caller is not None:
            one.caller.add(one)
    return tuple(one for one in known.values() if one.caller is None)


@dataclass(frozen=True, kw_only=True)
class HotCall:
    """A call that takes much of the time of making a batch.

    Attributes:
        name: The function that is called.
        caller: The function of the user's own code that calls it, directly or not; "" if there is none.
        line: The file and the line of that call, or of a function's own code; "" if unknown.
        share: The share of the time of making a batch, 0 to 1.
        wall_s, cpu_s: Seconds in all batches.
        waits_for: "data" or "other threads", if the call waits for most of its time; else "".
        is_awaited: True if the event loop does other work during the call.
        is_own_code: True for a function's own code, without the functions that it calls.
        is_collating: True for the collate function and its calls.
    """

    name: str
    caller: str = ""
    line: str = ""
    share: float
    wall_s: float
    cpu_s: float
    waits_for: str = ""
    is_awaited: bool = False
    is_own_code: bool = False
    is_collating: bool = False

    @property
    def title(self) -> str:
        """The call with its line."""
        if self.name == COLLATE:
            return "the collate function"
        line = f" ({self.line})" if self.line else ""
        return f"the own code of `{self.name}`{line}" if self.is_own_code else f"`{self.name}`{line}"

    @property
    def placed(self) -> str:
        """The call with its caller and its line."""
        is_inside = self.caller and not self.is_own_code
        return f"`{self.name}`, called in `{self.caller}` ({self.line})" if is_inside else self.title


def hot_calls(facts: Facts) -> tuple[HotCall, ...]:
    """Return calls with at least `LEAST` of the time of making a batch, costliest first. They are not nested."""
    least_s = LEAST * max(1e-12, facts.busy_s)
    found = [_hot(facts, leaf) for root in trees(facts) for leaf in _leaves(root, least_s)]
    named = [one for one in found if one.name != LOAD and one.share >= LEAST]
    return tuple(sorted(named, key=lambda one: -one.wall_s))


def _leaves(branch: CallBranch, least_s: float) -> Iterator[CallBranch]:
    """Yield the deepest nested calls that take at least ``least_s``, without the internals of libraries.

    Two internals are yielded all the same: a call that takes nearly all of the library's time, and the steps of a
    pipeline. A pipeline is one line that calls several functions, as in a ``Compose``.
    """
    large = [one for one in branch.within if one.all_wall_s >= least_s]
    is_library = any(one.is_of_user for one in branch.around) and not any(one.leads_to_user for one in branch.within)
    if is_library:
        sites = Counter(one.place for one in branch.within)
        steps = [one for one in large if sites[one.place] > 1]
        large = steps or [one for one in large if one.all_wall_s >= _NEARLY_ALL * branch.all_wall_s]
    for one in large:
        yield from _leaves(one, least_s)
    if not large:
        yield branch


def _hot(facts: Facts, leaf: CallBranch) -> HotCall:
    one = leaf
    same = _SAME if leaf.name == OWN_CODE else _SAME_FUNCTION
    while not one.is_of_user and one.caller is not None and one.caller.caller is not None:
        if one.all_wall_s < same * one.caller.all_wall_s:
            break
        one, same = one.caller, _SAME
    one = _innermost_of_object(one, leaf)
    is_own = one.name == OWN_CODE
    users = next((each for each in one.around if each.is_of_user), None)
    named = one.caller if is_own and one.caller is not None else one
    inside = users.caller if users is not None else None
    collates = one.fact.is_collating
    return HotCall(
        name=named.name,
        caller=inside.name if inside is not None and inside.caller is not None else "",
        line=users.place[1:-1] if users is not None else one.place[1:-1],
        share=one.all_wall_s / max(1e-12, facts.busy_s),
        wall_s=one.all_wall_s,
        cpu_s=one.all_cpu_s,
        waits_for=_waits_for(facts, one, leaf),
        is_awaited=leaf.name == AWAIT,
        is_own_code=is_own,
        is_collating=collates,
    )


def _innermost_of_object(one: CallBranch, leaf: CallBranch) -> CallBranch:
    """Follow calls from method to method of one class. Return the innermost, such as the ``forward`` of a module."""
    for inner in reversed(list(leaf.around)[: list(leaf.around).index(one)]):
        owner, _, method = one.name.rpartition(".")
        if (
            not method
            or not owner
            or inner.name.rpartition(".")[0] != owner
            or inner.all_wall_s < _SAME * one.all_wall_s
        ):
            break
        one = inner
    return one


def _waits_for(facts: Facts, one: CallBranch, leaf: CallBranch) -> str:
    queued = 0.0 if facts.is_asynchronous else facts.queueing_parts[int(one.fact.is_collating)]
    if (one.all_wall_s - one.all_cpu_s) * (1.0 - queued) < _HALF * one.all_wall_s:
        return ""
    return "other threads" if leaf.name.startswith("_thread.") else "data"


def sentence(facts: Facts) -> str:
    """Return the costliest calls in words; "" if no calls were timed or none stands out."""
    told: list[str] = []
    for one in hot_calls(facts)[:3]:
        of = "of making a batch " if not told else ""
        waits = f", which waits for {one.waits_for}" if one.waits_for else ""
        blocks = f"{waits} and blocks the event loop" if waits and is_blocking(facts, one) else waits
        told.append(f"{percent(one.share)} {of}is {one.placed if not told else one.title}{blocks}")
    return f"{'; '.join(told)}." if told else ""


def is_blocking(facts: Facts, one: HotCall) -> bool:
    """Return True if the call blocks the event loop while it waits, so that the worker's other samples wait, too."""
    return facts.is_asynchronous and bool(one.waits_for) and not one.is_awaited


def of_cause(facts: Facts, cause: str) -> Sequence[tuple[HotCall, float]]:
    """Return the calls with their seconds of computing ("cpu") or of waiting ("storage"), largest first."""
    seconds = [(one, one.cpu_s if cause == "cpu" else max(0.0, one.wall_s - one.cpu_s)) for one in hot_calls(facts)]
    return sorted(seconds, key=lambda pair: -pair[1])
