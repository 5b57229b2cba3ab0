"""A signal handler that raises, for all tests of this folder."""

from collections.abc import Iterator

import pytest
from places import raising_handler


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    """Have SIGUSR1 raise `TickError`."""
    with raising_handler():
        yield
