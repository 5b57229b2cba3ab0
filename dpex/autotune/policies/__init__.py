"""Policies: each looks at one `dpex.autotune.situation.Situation` and suggests a change of settings, or nothing.

`POLICIES` is the order in which `dpex.autotune.manager` asks them.
"""

from __future__ import annotations

from dpex.autotune.policies.base import Policy
from dpex.autotune.policies.explore import TryFewerOrMore, TryPrefetch
from dpex.autotune.policies.grow import Grow
from dpex.autotune.policies.prefetch import Prefetch
from dpex.autotune.policies.shrink import Shrink
from dpex.autotune.policies.straggler import Straggler
from dpex.autotune.policies.undo import Undo
from dpex.autotune.policies.walls import NoPlace, Walls

POLICIES: tuple[Policy, ...] = (
    Undo(),
    Straggler(),
    Walls(),
    NoPlace(),
    Grow(),
    Shrink(),
    Prefetch(),
    TryPrefetch(),
    TryFewerOrMore(),
)
