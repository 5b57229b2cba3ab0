"""Constants of levels: what is noise, what is a change of the work, and how alike successive batches are. PURE."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dpex.autotune.constants import Constants, constant


@dataclass(frozen=True, kw_only=True)
class LevelConstants(Constants):
    """A quantity that stays level until it does not."""

    memory: float = constant(
        600.0,
        "batches",
        10.0,
        100_000.0,
        "Batches over which a level is averaged, at least.",
        "Their mean is known to 4 % where times vary by their mean.",
    )
    windows: float = constant(
        24.0,
        "windows",
        2.0,
        1000.0,
        "Windows over which a level is averaged, at least.",
        "The pace of quick batches changes within half a minute, too.",
    )
    far_windows: int = constant(
        2,
        "windows",
        1,
        20,
        "Windows in a row that are far off show that the level has moved.",
        "A single window may have had a pause in it.",
        off=1_000_000_000,
    )
    far_off: float = constant(
        0.35,
        "ratio",
        0.05,
        5.0,
        "By this part of the level they must be off.",
        "What is less far off is told by one window more.",
    )
    off_windows: int = constant(
        3,
        "windows",
        2,
        20,
        "Windows in a row that are not so far off show it, too.",
        "Three windows that stray by chance to the same side are rare.",
        off=1_000_000_000,
    )
    off: float = constant(
        0.12,
        "ratio",
        0.01,
        5.0,
        "By this part of the level they must be off.",
        "A change of less than a tenth changes no setting.",
    )
    sigmas: float = constant(
        4.0,
        "standard errors",
        1.0,
        10.0,
        "By so much, at least, they must be off beyond what windows stray by.",
        "There is a window each second, and hours of them; false alarms cost a minute of learning.",
        off=0.0,
    )
    enough: int = constant(
        8,
        "batches",
        1,
        100,
        "So many uneven batches, at least, must say so together.",
        "A single slow one is no other level.",
        off=1,
    )
    enough_if_even: int = constant(
        3,
        "batches",
        1,
        100,
        "The same of batches that hardly vary.",
        "Each of them shows the level by itself.",
        off=1,
    )
    uneven: float = constant(
        0.5,
        "ratio",
        0.0,
        5.0,
        "Batches are uneven if they vary by more than this part of their mean.",
        "One that takes twice as long is no rarity then.",
        off=math.inf,
    )
    known_to: float = constant(
        3.0,
        "ratio",
        1.0,
        20.0,
        "The mean of uneven batches must be known to one part in so many.",
        "Where one takes a minute, those beside it end long before it.",
        off=1.0,
    )
    always_enough: int = constant(
        48,
        "batches",
        4,
        1000,
        "So many batches say so however uneven they are said to be.",
        "A spread that was measured wrongly must not hide what is measured now.",
        off=1_000_000_000,
    )
    kept_windows: int = constant(
        31,
        "windows",
        2,
        1000,
        "Windows that are remembered for this.",
        "So many hold enough batches, or batches are too slow for windows to tell.",
    )
    doubted_windows: int = constant(
        2,
        "windows",
        1,
        20,
        "The latest windows do not count for how far windows stray.",
        "They may be the first of another level.",
        off=1,
    )
    stray_memory: float = constant(
        30.0,
        "windows",
        2.0,
        1000.0,
        "Windows over which their straying is averaged.",
        "Long enough to know it, and short enough to follow a storage that becomes noisier.",
    )
    most_stray: float = constant(
        1.0,
        "ratio",
        0.1,
        100.0,
        "No window counts as further off than this part of the level, squared.",
        "One pause of ten seconds would hide every change for minutes.",
        off=math.inf,
    )
    far_below: float = constant(
        0.2,
        "ratio",
        0.01,
        1.0,
        "Windows at this part of the level are another level, however much windows stray.",
        "Nothing is less than nothing: noise would never let a level come down that was measured wrongly.",
        off=0.0,
    )
    trusted_windows: int = constant(
        3,
        "windows",
        1,
        20,
        "A level of fewer windows than these cannot be seen to move.",
        "It is still being learnt.",
        off=1,
    )


@dataclass(frozen=True, kw_only=True)
class CorrelationConstants(Constants):
    """Over how many batches costs stay alike."""

    kept_windows: int = constant(
        60,
        "windows",
        6,
        1000,
        "Windows that are remembered.",
        "A minute, once windows last a second.",
    )
    least_windows: int = constant(
        6,
        "windows",
        2,
        100,
        "Windows from which a length is told.",
        "The scatter of fewer is known to no better than half of itself.",
        off=2,
    )
    suspected: float = constant(
        20.0,
        "batches",
        0.0,
        500.0,
        "The length that is reckoned with before capacity is given back, while too few windows were seen to tell.",
        "Shards and caches make some dozens of batches alike; giving back too early costs a wait.",
        off=0.0,
    )
    told_by: int = constant(
        20,
        "windows",
        2,
        1000,
        "Windows that rule it out.",
        "They know the scatter to a quarter.",
        off=0,
    )
    doubt: float = constant(
        1.0,
        "standard errors",
        0.0,
        5.0,
        "By so much the scatter must exceed what independent batches explain.",
        "Less is chance as often as not.",
        off=0.0,
    )
    most_stray: float = constant(
        4.0,
        "ratio",
        0.5,
        100.0,
        "A window further off than so many times the level is no scatter.",
        "It tells of a change of the work.",
        off=math.inf,
    )
    shortest: float = constant(
        0.5,
        "batches",
        0.01,
        10.0,
        "The shortest length that is told.",
        "Batches that are alike over less than one are independent.",
    )
    longest: float = constant(
        500.0,
        "batches",
        10.0,
        10_000.0,
        "The longest length that is told.",
        "A longer memory cannot be told from a change of the work within the windows that are remembered.",
    )
    periods: float = constant(
        24.0,
        "ratio",
        2.0,
        1000.0,
        "Lengths that are played through.",
        "The mean of so many stands for the long run to within a fifth of their spread.",
    )
    least_replayed: int = constant(
        240,
        "batches",
        50,
        10_000,
        "Batches that are played at least.",
        "As many as where service times do not vary.",
    )
    most_replayed: int = constant(
        2400,
        "batches",
        240,
        100_000,
        "Batches that are played at most.",
        "They take some milliseconds for each setting that is compared.",
    )


LEVEL = LevelConstants()
CORRELATION = CorrelationConstants()
