"""Modules of tests that need a package which may be missing.

Every process of a run imports all modules of tests: those with large packages import these where they are used.
"""

from importlib.util import find_spec

import pytest


def need(package: str, reason: str) -> None:
    """Skip the module that asks, with that reason, where the package is missing. It is not imported, as against
    `pytest.importorskip`."""
    if find_spec(package) is None:
        pytest.skip(reason, allow_module_level=True)
