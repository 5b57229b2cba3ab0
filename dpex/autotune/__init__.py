"""Decides how many workers, where, and how far ahead: a law, and the tuner that drives a loader by it.

`Supervisor.step` takes a `Sample` (what was measured in a window of time) and returns a `Decision` or None. It is pure:
the same code drives a real loader (`dpex.autotune.runtime.tuner`), and a simulated or recorded one
(`benchmarks.simulation`).
"""
