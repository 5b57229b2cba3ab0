"""GPU metrics from the driver's library to the scrape: real pynvml, a real endpoint and loader, in a forked process.

The driver is `nvml_stub.c`, and so that a torch without CUDA believes in a GPU, what dpex asks it is answered here; the
stream, too, is a stand-in: nothing is queued on it, so it misses all of every stay in ``next()``.
"""

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from nvmlstub import built_in
from trainers import Forker

from dpex.telemetry.catalog import METRICS

FIRST = "GPU-00000000-aaaa-0000-0000-000000000000"
SECOND = "GPU-11111111-bbbb-0000-0000-000000000000"
PRELUDE = """
import ctypes, json, re, urllib.request
from types import SimpleNamespace
from dpex.system.gpu import nvml
from dpex.system.gpu.stall import GpuStall
from dpex.telemetry.exporter import exporter

def scrape():
    with urllib.request.urlopen(f"http://localhost:{exporter.port}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    return dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))

def of_gpus(found):
    return {name: float(value) for name, value in found.items() if "gpu" in name}
"""
PRETEND = """
stub = ctypes.CDLL("libnvidia-ml.so.1")
used = {}  # torch's number: what CUDA says is its UUID

def say(device, key, value):
    stub.stub_set(device, key.encode(), ctypes.c_longlong(value))

torch.version.cuda = "13.0"
torch.cuda.is_initialized = lambda: bool(used)
torch.cuda.device_count = lambda: 4
torch.cuda.get_device_properties = lambda ordinal: SimpleNamespace(uuid=used[ordinal])
torch._C._cuda_hasPrimaryContext = lambda ordinal: ordinal in used
nvml.PERIOD_S = 0.01
first = "00000000-aaaa-0000-0000-000000000000"

class Stream:
    is_open = staticmethod(lambda: bool(used))
    record = staticmethod(lambda like=None: time.perf_counter())
    is_passed = staticmethod(lambda mark: True)
    apart_s = staticmethod(lambda first, second: second - first)
    share_stream = staticmethod(lambda first, second: True)
    reuse = staticmethod(lambda mark: None)

stalls = []

def cuda_stall(share=None):
    stalls.append(GpuStall(Stream(), share))
    return stalls[-1]

import dpex.engine.in_process, dpex.engine.with_workers
dpex.engine.in_process.cuda_stall = dpex.engine.with_workers.cuda_stall = cuda_stall
"""


def forker_with(library: str, folder: Path) -> Forker:
    """A forker with its own file for what Prometheus is to look at. The loader of libraries looks into ``library``."""
    return Forker(folder, PRELUDE, LD_LIBRARY_PATH=library, DPEX_METRICS_DIR=str(folder / "sd"))


@pytest.fixture(scope="module")
def forker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forker]:
    """Its library is the stand-in."""
    folder = tmp_path_factory.mktemp("nvml")
    with closing(forker_with(str(built_in(folder)), folder)) as made:
        yield made


def run(script: str, forker: Forker, prelude: str = PRETEND) -> Any:
    """What ``script`` puts into ``answer``."""
    code, out, err = forker.run(f"{prelude}\n{script}\nprint(json.dumps(answer))")
    assert code == 0, err
    assert "Traceback" not in err, err
    return json.loads(out)


@pytest.mark.parametrize(
    "options", ["num_workers=0", "num_workers=0, seeding='batch'", "num_workers=2", "num_workers='auto'"]
)
def test_all_gpu_metrics_of_the_catalogue_are_scraped(forker: Forker, options: str) -> None:
    script = f"""
loader = DpexDataLoader(range(64), batch_size=4, metrics_port=0, name="train", {options})
list(loader)
before = of_gpus(scrape()), stub.stub_calls(b"nvmlInitWithFlags")
used[0] = first; used[1] = "11111111-bbbb-0000-0000-000000000000"
for device, factor in ((0, 1), (1, 2)):
    say(device, "busy", 40 * factor); say(device, "used", (5 << 30) * factor)
list(loader)
busy = 'dpex_gpu_kernel_active_ratio{{gpu="{FIRST}"}}'
found = of_gpus(until(lambda: (now := scrape()).get(busy) == "0.4" and now))
loader.close()
answer = before, found, exporter.port
"""
    before, found, port = run(script, forker)
    assert before == [{}, 0]
    assert port is None
    by_name = {name: {} for name in (metric.name for metric in METRICS if "gpu" in metric.name)}
    for series, value in found.items():
        name = series.partition("{")[0]
        if name in by_name:
            by_name[name][series.partition("{")[2]] = value
    assert all(by_name.values()), by_name
    assert by_name["dpex_gpu_kernel_active_ratio"] == {f'gpu="{FIRST}"}}': 0.4, f'gpu="{SECOND}"}}': 0.8}
    assert by_name["dpex_gpu_memory_size_bytes"] == {f'gpu="{gpu}"}}': float(80 << 30) for gpu in (FIRST, SECOND)}
    assert by_name["dpex_gpu_memory_used_bytes"][f'gpu="{SECOND}"}}'] == float(10 << 30)
    model = r"Stub \"H\" 200"
    assert set(by_name["dpex_gpu_info"]) == {
        f'gpu="{gpu}",index="{index}",model="{model}"}}' for index, gpu in enumerate((FIRST, SECOND))
    }
    assert list(by_name["dpex_gpu_stall_seconds_total"]) == ['loader="train"}']


def test_a_forked_process_has_no_gpus(forker: Forker) -> None:
    script = """
used[0] = first
loader = DpexDataLoader(range(8), metrics_port=0, num_workers=0)
list(loader)
until(lambda: any("kernel_active" in name for name in scrape()))
calls = stub.stub_calls(b"nvmlInitWithFlags")
pid = os.fork()
if pid == 0:
    used.clear()  # CUDA cannot be used here
    state = exporter.port, exporter.collector.gpu.latest(), len(list(loader))
    os._exit(0 if state == (None, (), 8) and calls == stub.stub_calls(b"nvmlInitWithFlags") else 1)
code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
answer = code, any("kernel_active" in name for name in scrape())
loader.close()
"""
    assert run(script, forker) == [0, True]


def test_without_a_gpu_nothing_appears_and_nothing_starts(tmp_path: Path) -> None:
    """Neither where torch was built without CUDA nor where it was built with it and nobody initialises that."""
    script = """
torch.version.cuda = "13.0" if has_cuda else None
torch.backends.cuda.is_built = lambda: has_cuda
if has_cuda:
    torch.cuda._lazy_init = None
for workers in (0, 2, "auto"):
    loader = DpexDataLoader(range(64), batch_size=4, metrics_port=0, num_workers=workers)
    list(loader)
    found = of_gpus(scrape()), exporter.collector.gpu is not None
    loader.close()
    assert found == ({}, has_cuda), found
answer = torch.cuda.is_initialized()
"""
    with closing(forker_with("/nonexistent", tmp_path)) as forker:
        for has_cuda in (False, True):
            assert run(script, forker, prelude=f"has_cuda = {has_cuda}") is False
