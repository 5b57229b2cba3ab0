"""A cluster that grows, in a process of its own, which asks for no tokens, as the head of that cluster does not.

Ray reads once in a process whether calls carry a token. A head that asks for none cannot call a process that does: it
takes that for dead, and ends its actors as soon as they are made.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from packages import need

pytestmark = [pytest.mark.long, pytest.mark.timeout(390)]
need("ray", "Ray is not installed")


def test_loaders_on_a_cluster_that_grows() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    own = {
        name: value for name, value in os.environ.items() if not name.startswith("RAY_")
    }  # Ray was here, and set some
    done = subprocess.run(
        [*command, str(Path(__file__).with_name("growing_loaders.py"))],
        env={**own, "RAY_AUTH_MODE": "disabled"},
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:]
    assert "2 passed" in done.stdout
