"""What tests with Ray define travels to workers by value: these cannot import modules of tests."""

import sys
from collections.abc import Iterator

import families
import pytest
import waiting
from shared_ray import by_value


@pytest.fixture(scope="module", autouse=True)
def tests_travel(request: pytest.FixtureRequest) -> Iterator[None]:
    """The module of the test, and what it imports of the tests."""
    others = [sys.modules[name] for name in ("pool_driver",) if name in sys.modules]
    with by_value(request.module, families, waiting, *others):
        yield
