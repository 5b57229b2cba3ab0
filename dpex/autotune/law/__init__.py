"""The law for the number of workers and the prefetch: its measurements, its model, and its decisions. PURE."""

from __future__ import annotations

from dataclasses import replace

from dpex.autotune.config import AutotuneConfig
from dpex.autotune.law.constants import CONSTANTS
from dpex.autotune.law.law import Law, start
from dpex.autotune.types import Settings

__all__ = ["Law", "law_for", "start"]


def law_for(config: AutotuneConfig, begin: Settings) -> Law:
    """A law that begins with the setting ``begin``, with the constants that the configuration gives."""
    constants = replace(CONSTANTS, goal=config.wait_goal, headroom=config.headroom)
    return Law(config, begin, constants)
