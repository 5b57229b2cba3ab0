"""Under ``-X dev`` neither the training process nor its workers leave a socket or file to the garbage collector."""

import pytest
from programs import ran

SCRIPT = """
import sys, warnings
warnings.simplefilter("ignore")
warnings.simplefilter("always", ResourceWarning)
from dpex import DpexDataLoader

if __name__ == "__main__":
    loader = DpexDataLoader(range(20), 4, num_workers=2, seeding="batch", multiprocessing_context=sys.argv[1])
    for _ in range(2):
        assert len(list(loader)) == 5
    left = iter(loader)
    next(left)
    del left
    loader.close()
"""


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.long)])
def test_no_resource_is_left_to_the_collector(method: str) -> None:
    assert "ResourceWarning" not in ran("-W", "always::ResourceWarning", "-c", SCRIPT, method).stderr
