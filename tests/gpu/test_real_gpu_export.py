"""On a real GPU: what the endpoint says of it while a loop trains. Needs prometheus-client, too."""

from __future__ import annotations

import re
import time
import urllib.request
from pathlib import Path

import pytest
import torch
from torch.utils.data import Dataset
from workload import wait_as_work

from dpex import DpexDataLoader

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
WAIT_S = 0.01


class Slow(Dataset[torch.Tensor]):
    """Batches for which the GPU waits."""

    def __len__(self) -> int:
        return 300

    def __getitem__(self, index: int) -> torch.Tensor:
        wait_as_work(WAIT_S)
        return torch.full((1000,), float(index))


def scrape() -> dict[str, float]:
    from dpex.telemetry.exporter import exporter

    with urllib.request.urlopen(f"http://localhost:{exporter.port}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return {series: float(value) for series, value in (x.rsplit(" ", 1) for x in lines if not x.startswith("#"))}


@pytest.mark.parametrize("workers", [0, 2])
def test_the_gpu_in_use_is_scraped_and_the_stream_s_stall(
    workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("prometheus_client")
    monkeypatch.setenv("DPEX_METRICS_DIR", str(tmp_path))
    device = torch.device("cuda", 0)
    weights = torch.ones(1000, device=device)
    with DpexDataLoader(Slow(), num_workers=workers, metrics_port=0, name="train") as loader:
        began = time.monotonic()
        for batch in loader:
            weights += batch.to(device).sum()
            if time.monotonic() - began < 0.2:
                scrape()
        wall_s, found = time.monotonic() - began, scrape()
    uuids = {match[1] for series in found if (match := re.search(r'dpex_gpu_info\{gpu="([^"]+)"', series))}
    own = str(torch.cuda.get_device_properties(device).uuid)
    assert [uuid.removeprefix("GPU-").removeprefix("MIG-") for uuid in uuids] == [own.removeprefix("GPU-")]
    stall_s = found['dpex_gpu_stall_seconds_total{loader="train"}']
    inside_s = sum(
        found[f'dpex_consumer_seconds_total{{loader="train",state="{state}"}}'] for state in ("wait", "transfer")
    )
    print({series: value for series, value in found.items() if "gpu" in series}, wall_s)
    assert 0.5 * 300 * WAIT_S / max(1, workers) < stall_s <= inside_s + 1e-3
