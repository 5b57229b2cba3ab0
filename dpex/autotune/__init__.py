"""Decides how many workers, where, and how far ahead. PURE: standard library and itself only; others measure and act.

`Controller.step` takes a `Sample` (what was measured in a window of time) and returns a `Decision` or None. The same
code drives a real loader (`dpex.autotune.runtime.tuner`), a simulated one (`benchmarks.simulation`) and a recorded one
(`replay`).
"""
