"""A real Jupyter kernel: classes of a notebook in local workers, spawned ones and Ray's, and what it shows."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packages import need

pytestmark = pytest.mark.timeout(300)
for package in ("jupyter_client", "ipykernel", "ray"):
    need(package, f"needs {package}: pip install {package}")

CLASSES = """
import torch
from torch.utils.data import Dataset
from dpex import DpexDataLoader

class Numbers(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return torch.tensor(Doubled(index).value)

class Doubled:
    def __init__(self, index):
        self.value = 2 * index

def collate(samples):
    return torch.stack(samples)

def batches(**options):
    with DpexDataLoader(Numbers(), 4, collate_fn=collate, **options) as loader:
        return [batch.tolist() for batch in loader]
"""
WAYS = {
    "auto": 'num_workers="auto"',
    "fork": "num_workers=1",
    "spawn": 'num_workers=1, multiprocessing_context="spawn"',
    "Ray": 'num_workers=1, distribute_mode=True, head_address="local"',
}


class Kernel:
    """Runs cells, and has what they printed and returned."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def run(self, code: str) -> dict[str, str]:
        """The result of the last line by MIME type, with "out": what was printed."""
        found: dict[str, str] = {"out": ""}

        def take(message: Any) -> None:
            content = message["content"]
            if message["msg_type"] == "stream":
                found["out"] += content["text"]
            elif message["msg_type"] == "execute_result":
                found.update(content["data"])

        reply = self._client.execute_interactive(code, output_hook=take, timeout=200)["content"]
        assert reply["status"] == "ok", "\n".join(reply["traceback"])
        return found


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    from jupyter_client.manager import start_new_kernel

    manager, client = start_new_kernel(kernel_name="python3", startup_timeout=120)
    notebook = Kernel(client)
    notebook.run(CLASSES)
    yield notebook
    client.stop_channels()
    manager.shutdown_kernel()


@pytest.mark.parametrize("way", [pytest.param(way, marks=pytest.mark.long) if way == "Ray" else way for way in WAYS])
def test_classes_of_a_notebook_reach_workers(kernel: Kernel, way: str) -> None:
    assert kernel.run(f"batches({WAYS[way]})")["text/plain"] == "[[0, 2, 4, 6], [8, 10, 12, 14]]"


def test_a_redefined_class_replaces_the_former_one(kernel: Kernel) -> None:
    kernel.run("class Doubled:\n    def __init__(self, index):\n        self.value = 3 * index")
    assert kernel.run("batches(num_workers=1)")["text/plain"] == "[[0, 3, 6, 9], [12, 15, 18, 21]]"


def test_a_loader_is_shown(kernel: Kernel) -> None:
    shown = kernel.run("loader = DpexDataLoader(Numbers(), 4, num_workers='auto', name='mine')\nlist(loader)\nloader")
    assert "DpexDataLoader mine" in shown["text/plain"]


def test_the_notebook_of_the_examples_runs(kernel: Kernel) -> None:
    notebook = json.loads((Path(__file__).parents[2] / "examples" / "notebook.ipynb").read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] for cell in cells)
    shown = [kernel.run("".join(cell["source"])) for cell in cells]
    assert "batches/s" in shown[1]["text/plain"]
    assert "expected" in shown[3]["text/plain"]
    assert "dpex diagnosis of stored" in shown[4]["text/plain"]
    assert 'num_workers="auto"' in shown[5]["text/plain"].replace("&quot;", '"')
