"""Fakes for tests, of dpex and of what is built on it: a worker pool without processes."""

from dpex.testing.fake_pool import FakePool, Work

__all__ = ["FakePool", "Work"]
