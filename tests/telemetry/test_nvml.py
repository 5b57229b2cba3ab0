"""What is read from NVML: the real pynvml on a stand-in for the driver's library, in processes of their own."""

import json
import os
import shutil
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from nvmlstub import built_in
from programs import ran
from waiting import ManualClock

from dpex.system.gpu.nvml import PERIOD_S, Gpus, cuda_devices

ROOT = Path(__file__).parents[2]
REST = "-0000-0000-000000000000"
FIRST, SECOND = f"00000000-aaaa{REST}", f"11111111-bbbb{REST}"
PRELUDE = """
import ctypes, itertools, json, logging, sys
from dataclasses import asdict
from dpex.system.gpu import nvml

class Notes(logging.Handler):
    def emit(self, record):
        notes.append(record.getMessage())

notes = []
logging.getLogger("dpex").setLevel(logging.DEBUG)
logging.getLogger("dpex").addHandler(Notes())
stub = ctypes.CDLL("libnvidia-ml.so.1")
used = {0: "00000000-aaaa-0000-0000-000000000000"}
seconds = itertools.count()

def say(device, key, value):
    stub.stub_set(device, key.encode(), ctypes.c_longlong(value))

def calls(name):
    return stub.stub_calls(name.encode())

def read():
    return [asdict(sample) for sample in gpus.latest()]

gpus = nvml.Gpus(lambda: used, lambda: next(seconds))  # each reading a second after the one before
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the stand-in."""
    return built_in(tmp_path_factory.mktemp("nvml"))


def run(script: str, library: Path | None, prelude: str = PRELUDE) -> Any:
    """What ``script`` puts into ``answer``, in a new process with that library (None: an empty folder)."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "LD_LIBRARY_PATH": str(library or "/nonexistent")}
    done = ran("-c", f"{prelude}\n{script}\nprint(json.dumps(answer))", env=environment)
    return json.loads(done.stdout)


def test_a_gpu_that_offers_everything(library: Path) -> None:
    script = """
say(0, "busy", 40); say(0, "used", 5 << 30)
first = read()
say(0, "busy", 90)
answer = first, read(), "torch" in sys.modules, notes
"""
    (first,), (second,), has_torch, notes = run(script, library)
    assert first == {
        "uuid": f"GPU-{FIRST}",
        "ordinal": 0,
        "index": 0,
        "model": 'Stub "H" 200',
        "kernel_active_ratio": 0.4,
        "memory_used_bytes": 5 << 30,
        "memory_total_bytes": 80 << 30,
    }
    assert second["kernel_active_ratio"] == 0.9
    assert not has_torch  # `dpex top` needs none
    assert notes == []


def test_a_passing_error_makes_one_value_none(library: Path) -> None:
    script = """
found = []
for code in (999, 0, 3, 0):
    say(0, "rc:nvmlDeviceGetUtilizationRates", code)
    (sample,) = read()
    found.append([sample["kernel_active_ratio"], sample["memory_used_bytes"]])
answer = found
"""
    assert run(script, library) == [[None, 0], [0.0, 0], [None, 0], [0.0, 0]]


def test_a_gpu_that_is_lost_while_training_runs(library: Path) -> None:
    script = """
used[1] = "11111111-bbbb-0000-0000-000000000000"
before = [sample["ordinal"] for sample in read()]
say(0, "lost", 1)
after = [[sample["ordinal"] for sample in read()] for _ in range(3)]
asked = calls("nvmlDeviceGetUtilizationRates")
say(1, "lost", 1)
answer = before, after, asked, read(), read(), sum("lost" in note.lower() for note in notes)
"""
    assert run(script, library) == [[0, 1], [[1]] * 3, 2 + 4, [], [], 2]


@pytest.mark.parametrize(
    ("uuid", "found"),
    [(SECOND, [f"GPU-{SECOND}"]), (f"GPU-{SECOND}", [f"GPU-{SECOND}"]), ("0" * 8, [])],
    ids=["CUDA numbers them otherwise", "CUDA says it with its kind", "CUDA says a UUID that nobody has"],
)
def test_the_right_gpu_is_found(library: Path, uuid: str, found: list[str]) -> None:
    assert run(f"used = {{0: {uuid!r}}}; answer = [sample['uuid'] for sample in read()]", library) == found


def test_a_part_of_a_gpu_says_what_it_can(library: Path) -> None:
    script = f"""
used = {{0: {f"33333333-dddd{REST}"!r}}}
say(3, "rc:nvmlDeviceGetUtilizationRates", 3)
say(3, "rc:nvmlDeviceGetIndex", 2)
say(3, "rc:nvmlDeviceGetName", 3)
say(3, "used", 1 << 20)
answer = read() + read()
"""
    for sample in run(script, library):
        known = {name: value for name, value in sample.items() if value is not None}
        assert known == {
            "uuid": f"MIG-33333333-dddd{REST}",
            "ordinal": 0,
            "model": "",
            "memory_used_bytes": 1 << 20,
            "memory_total_bytes": 80 << 30,
        }


NO_STUB = PRELUDE.replace('stub = ctypes.CDLL("libnvidia-ml.so.1")', "")
ABSENT = "answer = read(), read(), len(notes)"


@pytest.mark.parametrize("trouble", ["", "sys.modules['pynvml'] = None;"])
def test_without_pynvml_or_the_drivers_library_there_is_nothing(trouble: str) -> None:
    if not trouble and shutil.which("nvidia-smi"):
        pytest.skip("this machine has the library")
    assert run(trouble + ABSENT, None, prelude=NO_STUB) == [[], [], 1]


def test_without_a_driver_there_is_nothing(library: Path) -> None:
    assert run(f"say(-1, 'rc:nvmlInitWithFlags', 9); {ABSENT}", library) == [[], [], 1]


@pytest.mark.parametrize("trouble", ["(-1, 'rc:nvmlInitWithFlags', ", "(0, 'lost', "], ids=["no driver", "a lost GPU"])
def test_what_has_failed_is_tried_again_after_a_while(library: Path, trouble: str) -> None:
    """A GPU that was reset had no readings for the rest of the process."""
    script = f"""
ordinals = lambda: [sample["ordinal"] for sample in read()]
say{trouble}9)
failed = ordinals()
say{trouble}0)
too_early = ordinals()
seconds = itertools.count(int(nvml.RETRY_S))
answer = failed, too_early, ordinals(), ordinals()
"""
    assert run(script, library) == [[], [], [0], [0]]


def test_only_gpus_with_a_context_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank sees the GPUs of all ranks, and uses one."""

    def properties(ordinal: int) -> SimpleNamespace:
        return SimpleNamespace(uuid=f"uuid-{ordinal}")

    cuda = SimpleNamespace(is_initialized=lambda: True, device_count=lambda: 8, get_device_properties=properties)
    monkeypatch.setattr("dpex._torch.has_cuda_context", lambda ordinal: ordinal in (3, 5))
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    assert cuda_devices() == {3: "uuid-3", 5: "uuid-5"}
    cuda.is_initialized = lambda: False
    assert cuda_devices() == {}


def test_a_reading_is_cached_and_blocks_no_other_thread() -> None:
    clock, asked, reading, go_on = ManualClock(100.0), [], threading.Event(), threading.Event()

    def devices() -> dict[int, str]:
        asked.append(clock())
        reading.set()
        assert go_on.wait(60.0)
        return {}

    gpus = Gpus(devices, clock)
    first = threading.Thread(target=gpus.latest)
    first.start()
    assert reading.wait(60.0)
    assert gpus.latest() == ()  # although the driver hangs
    go_on.set()
    first.join(60.0)
    clock.advance(0.9 * PERIOD_S)
    assert gpus.busy_ratio() is None
    assert asked == [100.0]
    clock.advance(0.1 * PERIOD_S)
    gpus.latest()
    assert asked == [100.0, 100.0 + PERIOD_S]


def test_the_gpus_of_a_process_are_busy_on_average(library: Path) -> None:
    script = """
used[1] = "11111111-bbbb-0000-0000-000000000000"
say(0, "busy", 50); say(1, "busy", 25)
both = gpus.busy_ratio()
say(0, "rc:nvmlDeviceGetUtilizationRates", 3); say(1, "rc:nvmlDeviceGetUtilizationRates", 3)
answer = both, gpus.busy_ratio()
"""
    assert run(script, library) == [0.375, None]
