"""A decision of the tuner, for tests of what becomes of it."""

from typing import Any

from dpex.autotune.types import Decision
from dpex.measure.settings import Settings


def a_decision(**changes: Any) -> Decision:
    """Return a decision for more workers that is not judged yet, with these fields changed."""
    fields: dict[str, Any] = {
        "at": 1.0,
        "old": Settings(local=1, prefetch=2),
        "new": Settings(local=4, prefetch=8),
        "reason": "too few",
        "text": "why",
        "evidence": {},
        "predicted_rate": 10.0,
        "predicted_wait": 0.1,
    }
    return Decision(**fields | changes)
