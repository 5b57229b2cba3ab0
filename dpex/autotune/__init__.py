"""Tuning: a law that chooses workers and prefetch, and the tuner that drives a loader by it.

`Supervisor.step` takes a window of measurements (`dpex.measure.reading.Reading`) and returns a `Decision` or None. It
is pure. The same code drives a real loader (`dpex.autotune.runtime.tuner`) and a simulated or recorded one
(`benchmarks.simulation`).
"""
