"""What is read from NVML: the real pynvml on a stand-in for the driver's library, in processes of their own."""

from __future__ import annotations

import gc
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from nvmlstub import built_in
from waiting import until

from dpex.system.gpu.nvml import GpuSample, GpuWatcher, Reader, RunningCount, cuda_devices, parse_visible, view

ROOT = Path(__file__).parents[2]
FIRST, SECOND, THIRD = "00000000-aaaa", "11111111-bbbb", "11112222-cccc"
REST = "-0000-0000-000000000000"
PRELUDE = """
import ctypes, json, logging, sys
from dataclasses import asdict
from dpex.system.gpu import nvml

class Notes(logging.Handler):
    def emit(self, record):
        notes.append(record.getMessage())

notes = []
logging.getLogger("dpex").setLevel(logging.DEBUG)
logging.getLogger("dpex").addHandler(Notes())
stub = ctypes.CDLL("libnvidia-ml.so.1")
used = {0: ""}

def say(device, key, value):
    stub.stub_set(device, key.encode(), ctypes.c_longlong(value))

def calls(name):
    return stub.stub_calls(name.encode())

def read():
    return [asdict(sample) for sample in reader.sample()]

reader = nvml.Reader(lambda: used)
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the stand-in."""
    return built_in(tmp_path_factory.mktemp("nvml"))


def run(script: str, library: Path | None, visible: str | None = None, prelude: str = PRELUDE) -> Any:
    """What ``script`` puts into ``answer``, in a new process with that library (None: an empty folder)."""
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    environment |= {"PYTHONPATH": str(ROOT), "LD_LIBRARY_PATH": str(library or "/nonexistent")}
    if visible is not None:
        environment["CUDA_VISIBLE_DEVICES"] = visible
    done = subprocess.run(
        [sys.executable, "-c", f"{prelude}\n{script}\nprint(json.dumps(answer))"],
        capture_output=True,
        text=True,
        env=environment,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


# -- what a GPU says ---------------------------------------------------------------------------------------------------


def test_a_gpu_that_offers_everything(library: Path) -> None:
    script = """
say(0, "gpm", 1); say(0, "busy", 40); say(0, "sm", 20); say(0, "used", 5 << 30); say(0, "tx", 1000); say(0, "rx", 7)
first = read()
say(0, "busy", 90); say(0, "sm", 60); say(0, "tx", 1500); say(0, "rx", 107); say(0, "throttle", 0x44)
second = read()
say(0, "sm", 80)
third = read()
answer = first, second, third, "torch" in sys.modules, notes
"""
    (first,), (second,), (third,), has_torch, notes = run(script, library)
    assert first == {
        "uuid": f"GPU-{FIRST}{REST}",
        "ordinal": 0,
        "index": 0,
        "model": 'Stub "H" 200',
        "kernel_active_ratio": 0.4,
        "sm_active_ratio": None,
        "sm_occupancy_ratio": None,
        "dram_active_ratio": None,
        "memory_used_bytes": 5 << 30,
        "memory_total_bytes": 80 << 30,
        "pcie_tx_bytes": 0,
        "pcie_rx_bytes": 0,
        "held_back": [],
    }
    assert second["held_back"] == ["the power limit", "the temperature, by the hardware"]
    assert second["kernel_active_ratio"] == 0.9
    assert (second["sm_active_ratio"], second["sm_occupancy_ratio"], second["dram_active_ratio"]) == (0.4, 0.2, 0.4)
    assert (second["pcie_tx_bytes"], second["pcie_rx_bytes"]) == (500, 100)
    assert third["sm_active_ratio"] == 0.7
    assert not has_torch
    assert notes == []


def test_handles_are_kept(library: Path) -> None:
    script = """
used[1] = ""
for _ in range(5):
    read()
names = ("nvmlInitWithFlags", "nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetUUID", "nvmlDeviceGetUtilizationRates")
answer = [calls(name) for name in names]
"""
    assert run(script, library) == [1, 2, 2, 10]


def test_what_is_not_offered_is_asked_once(library: Path) -> None:
    """MIG, for one: neither utilisation nor the GPU's own counters; and a driver that lacks the fields."""
    script = """
say(0, "rc:nvmlDeviceGetUtilizationRates", 3)
say(0, "rc:tx", 3); say(0, "rc:rx", 2)
found = [read() for _ in range(5)]
names = ("nvmlDeviceGetUtilizationRates", "nvmlGpmQueryDeviceSupport", "nvmlGpmSampleAlloc", "nvmlDeviceGetFieldValues",
         "nvmlDeviceGetMemoryInfo")
answer = found, [calls(name) for name in names], notes
"""
    found, calls, notes = run(script, library)
    assert calls == [1, 1, 0, 1, 5]
    for (sample,) in found:
        known = {name for name, value in sample.items() if value is not None}
        assert known == {"uuid", "ordinal", "index", "model", "memory_used_bytes", "memory_total_bytes", "held_back"}
    assert len(notes) == 3  # one each for utilisation, GPM, PCIe


def test_single_figures_that_are_not_offered_are_asked_once(library: Path) -> None:
    script = """
say(0, "gpm", 1); say(0, "rc:dram", 3); say(0, "rc:tx", 3); say(0, "sm", 50)
found = [read() for _ in range(4)]
answer = found, [calls(name) for name in ("sm", "occupancy", "dram", "nvmlDeviceGetFieldValues")]
"""
    found, calls = run(script, library)
    assert calls == [3, 3, 1, 4]
    (last,) = found[-1]
    assert (last["sm_active_ratio"], last["sm_occupancy_ratio"], last["dram_active_ratio"]) == (0.5, 0.25, None)
    assert (last["pcie_tx_bytes"], last["pcie_rx_bytes"]) == (None, None)


def test_an_answer_that_is_no_number_is_none(library: Path) -> None:
    script = 'say(0, "gpm", 1); say(0, "nan", 1); read(); answer = read() + read()'
    for sample in run(script, library):
        assert sample["dram_active_ratio"] is None
        assert sample["sm_active_ratio"] == 0.0


def test_a_passing_error_is_forgiven_and_a_lasting_one_is_not_asked_about_for_ever(library: Path) -> None:
    script = """
found = []
for code in (999, 999, 0, 10, 10, 10, 0, 0):
    say(0, "rc:nvmlDeviceGetUtilizationRates", code)
    found.append(read()[0]["kernel_active_ratio"])
answer = found, calls("nvmlDeviceGetUtilizationRates"), sum("utilisation" in note for note in notes)
"""
    assert run(script, library) == [[None, None, 0.0, None, None, None, None, None], 6, 1]


def test_a_gpu_that_is_lost_while_training_runs(library: Path) -> None:
    script = """
used[1] = ""
before = [sample["ordinal"] for sample in read()]
say(0, "lost", 1)
after = [[sample["ordinal"] for sample in read()] for _ in range(3)]
asked = calls("nvmlDeviceGetUtilizationRates")
say(1, "lost", 1)
answer = before, after, asked, read(), read(), sum("lost" in note.lower() for note in notes)
reader.close()
reader.close()
"""
    assert run(script, library) == [[0, 1], [[1]] * 3, 2 + 4, [], [], 2]


def test_closing_gives_back_what_the_driver_lent(library: Path) -> None:
    script = """
say(0, "gpm", 1)
read(); reader.close(); reader.close()
answer = [calls(name) for name in ("nvmlGpmSampleAlloc", "nvmlGpmSampleFree", "nvmlShutdown")], read()
"""
    assert run(script, library) == [[2, 2, 1], []]


@pytest.mark.parametrize("bits", [32, 64])
def test_pcie_counts_wrap(library: Path, bits: int) -> None:
    script = f"""
say(0, "type", {1 if bits == 32 else 3})
found = []
for count in ({2**bits - 10}, 5, 25):
    say(0, "rx", count if count < 1 << 63 else count - (1 << 64))
    found.append(read()[0]["pcie_rx_bytes"])
answer = found
"""
    assert run(script, library) == [0, 15, 35]


def test_pcie_counts_that_never_move_are_absent(library: Path) -> None:
    """As on a virtual machine whose driver answers 0, however much is copied."""
    script = """
say(0, "rx", 0)
answer = [read()[0]["pcie_rx_bytes"] for _ in range(3)]
say(0, "rx", 12)
answer.append(read()[0]["pcie_rx_bytes"])
"""
    assert run(script, library) == [None, None, None, 12]


def test_a_counter_that_was_set_back_begins_anew() -> None:
    count = RunningCount()
    assert [count.add(now, 64) for now in (10**12, 10**12 + 5, 3, 10)] == [0, 5, 5, 12]


# -- which GPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("visible", "found"),
    [
        (None, [0, 1, 2]),
        ("", [None, None, None]),
        ("2,0", [2, 0, None]),
        (" 1 , 2 ", [1, 2, None]),
        ("1,-1,2", [1, None, None]),
        ("GPU-a,GPU-b", ["GPU-a", "GPU-b", None]),
        ("MIG-a,1", ["MIG-a", 1, None]),
        ("nonsense,1", [None, None, None]),
    ],
)
def test_visible_devices(visible: str | None, found: list[int | str | None]) -> None:
    assert [parse_visible(visible, ordinal) for ordinal in range(3)] == found


@pytest.mark.parametrize(
    ("visible", "used", "found"),
    [
        pytest.param(None, {1: ""}, [SECOND], id="all are visible"),
        pytest.param("2,0", {0: "", 1: ""}, [THIRD, FIRST], id="indices"),
        pytest.param(f"GPU-{THIRD}{REST},GPU-{FIRST}{REST}", {0: "", 1: ""}, [THIRD, FIRST], id="UUIDs"),
        pytest.param("GPU-1111222,GPU-0", {0: "", 1: ""}, [THIRD, FIRST], id="beginnings"),
        pytest.param("GPU-1111", {0: ""}, [], id="an ambiguous beginning"),
        pytest.param("7", {0: ""}, [], id="no such index"),
        pytest.param(f"GPU-9{REST}", {0: ""}, [], id="no such UUID"),
        pytest.param("0,1", {0: SECOND + REST, 1: FIRST + REST}, [SECOND, FIRST], id="CUDA numbers them otherwise"),
        pytest.param("2", {0: f"GPU-{SECOND}{REST}"}, [SECOND], id="CUDA says it with its kind"),
        pytest.param("2", {0: "0" * 8}, [THIRD], id="CUDA says a UUID that nobody has"),
    ],
)
def test_the_right_gpu_is_found(library: Path, visible: str | None, used: dict[int, str], found: list[str]) -> None:
    script = f"used = {used!r}; answer = [sample['uuid'] for sample in read()]"
    assert run(script, library, visible) == [f"GPU-{uuid}{REST}" for uuid in found]


@pytest.mark.parametrize("uuid", ["", f"33333333-dddd{REST}"])
def test_a_part_of_a_gpu_says_what_it_can(library: Path, uuid: str) -> None:
    script = f"""
used = {{0: {uuid!r}}}
say(3, "rc:nvmlDeviceGetUtilizationRates", 3)
say(3, "rc:nvmlDeviceGetFieldValues", 3)
say(3, "rc:nvmlGpmQueryDeviceSupport", 2)
say(3, "rc:nvmlDeviceGetIndex", 2)
say(3, "rc:nvmlDeviceGetName", 3)
say(3, "rc:nvmlDeviceGetCurrentClocksThrottleReasons", 3)
say(3, "used", 1 << 20)
answer = read() + read()
"""
    for sample in run(script, library, f"MIG-33333333-dddd{REST}"):
        known = {name: value for name, value in sample.items() if value is not None}
        assert known == {
            "uuid": f"MIG-33333333-dddd{REST}",
            "ordinal": 0,
            "model": "",
            "memory_used_bytes": 1 << 20,
            "memory_total_bytes": 80 << 30,
        }


# -- nothing there -----------------------------------------------------------------------------------------------------

NO_STUB = PRELUDE.replace('stub = ctypes.CDLL("libnvidia-ml.so.1")', "")
ABSENT = "answer = read(), read(), reader.is_hopeless, len(notes)"


def test_without_the_drivers_library_there_is_nothing() -> None:
    if shutil.which("nvidia-smi"):
        pytest.skip("this machine has the library")
    assert run(ABSENT, None, prelude=NO_STUB) == [[], [], True, 1]


def test_without_pynvml_there_is_nothing() -> None:
    assert run(f"sys.modules['pynvml'] = None; {ABSENT}", None, prelude=NO_STUB) == [[], [], True, 1]


def test_without_a_driver_there_is_nothing(library: Path) -> None:
    assert run(f"say(-1, 'rc:nvmlInitWithFlags', 9); {ABSENT}", library) == [[], [], True, 1]


def test_nvml_is_not_touched_before_cuda_is_used(library: Path) -> None:
    script = """
used.clear()
early = read(), "pynvml" in sys.modules, calls("nvmlInitWithFlags")
used[0] = ""
answer = early, len(read()), reader.is_hopeless
"""
    assert run(script, library) == [[[], False, 0], 1, False]


def test_only_gpus_with_a_context_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank sees the GPUs of all ranks, and uses one."""

    def properties(ordinal: int) -> SimpleNamespace:
        return SimpleNamespace(uuid=f"uuid-{ordinal}")

    cuda = SimpleNamespace(is_initialized=lambda: True, device_count=lambda: 8, get_device_properties=properties)
    monkeypatch.setattr("torch._C._cuda_hasPrimaryContext", lambda ordinal: ordinal in (3, 5), raising=False)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    assert cuda_devices() == {3: "uuid-3", 5: "uuid-5"}
    cuda.is_initialized = lambda: False
    assert cuda_devices() == {}


def test_torch_alone_is_no_reason_to_ask(library: Path) -> None:
    """It is imported, and has not initialised CUDA."""
    script = "import torch; answer = nvml.cuda_devices(), nvml.Reader().sample(), calls('nvmlInitWithFlags')"
    assert run(script, library) == [{}, [], 0]


# -- the thread --------------------------------------------------------------------------------------------------------


class Fake(Reader):
    """A reader that counts."""

    def __init__(self, ratio: float | None = 0.5) -> None:
        super().__init__(dict)
        self.ratio = ratio
        self.read = threading.Event()
        self.closed_by: list[str] = []

    def sample(self) -> tuple[GpuSample, ...]:
        self.read.set()
        self.threads = [thread.name for thread in threading.enumerate()]
        return tuple(
            GpuSample(uuid=f"GPU-{n}", ordinal=n, kernel_active_ratio=self.ratio and self.ratio / (n + 1))
            for n in range(2)
        )

    def close(self) -> None:
        self.closed_by.append(threading.current_thread().name)


def nvml_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "dpex-nvml"]


@pytest.fixture
def readers() -> Iterator[list[Fake]]:
    made: list[Fake] = []
    yield made
    gc.collect()
    for thread in nvml_threads():
        thread.join(60.0)
    assert nvml_threads() == []


def watching(readers: list[Fake], is_used: Callable[[], bool] = lambda: True, **options: Any) -> GpuWatcher:
    def make() -> Fake:
        readers.append(Fake(**options))
        return readers[-1]

    return GpuWatcher(make, period_s=0.001, is_used=is_used)


def seen(view: Any, reader: Fake) -> None:
    """Until the thread has published what it read."""
    assert reader.read.wait(60.0)
    until(lambda: view.gpus or not nvml_threads())


def test_users_share_one_thread_which_ends_with_the_last(readers: list[Fake]) -> None:
    watcher = watching(readers)
    one, other = watcher.view(), watcher.view()
    assert len(readers) == len(nvml_threads()) == 1
    seen(one, readers[0])
    assert [gpu.uuid for gpu in other.gpus] == ["GPU-0", "GPU-1"]
    assert one.busy_ratio() == 0.375
    one.close()
    one.close()
    assert one.gpus == ()
    assert len(nvml_threads()) == 1
    other.close()
    assert nvml_threads() == []
    assert readers[0].closed_by == ["dpex-nvml"]
    assert other.gpus == ()
    third = watcher.view()
    assert len(readers) == 2
    third.close()


def test_the_thread_starts_when_cuda_is_used_and_somebody_looks(readers: list[Fake]) -> None:
    used: list[bool] = []
    watcher = watching(readers, lambda: bool(used))
    view, late = watcher.view(), watcher.view()
    assert view.busy_ratio() is None
    assert readers == nvml_threads() == []
    used.append(True)
    late.close()
    assert late.gpus == ()
    assert readers == []
    assert len(view.gpus) in (0, 2)
    seen(view, readers[0])
    assert len(view.gpus) == 2
    view.close()
    assert nvml_threads() == []
    assert view.gpus == ()
    assert len(readers) == 1


def test_many_first_looks_at_once_start_one_thread(readers: list[Fake]) -> None:
    used: list[bool] = []
    watcher = watching(readers, lambda: bool(used))
    view, start = watcher.view(), threading.Barrier(8)

    def look() -> None:
        start.wait(60.0)
        assert len(view.gpus) in (0, 2)

    threads = [threading.Thread(target=look) for _ in range(8)]
    used.append(True)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert len(readers) == len(nvml_threads()) == 1
    view.close()


def test_a_user_that_was_forgotten_is_noticed(readers: list[Fake]) -> None:
    view = watching(readers).view()
    (thread,) = nvml_threads()
    del view
    gc.collect()
    thread.join(60.0)
    assert not thread.is_alive()


def test_what_is_not_known_is_none(readers: list[Fake]) -> None:
    view = watching(readers, ratio=None).view()
    seen(view, readers[0])
    assert view.busy_ratio() is None
    view.close()


def test_a_hopeless_reader_ends_the_thread_and_is_not_made_again(readers: list[Fake]) -> None:
    watcher = watching(readers)
    view = watcher.view()
    (thread,) = nvml_threads()
    readers[0].is_hopeless = True
    thread.join(60.0)
    assert view.gpus == ()
    view.close()
    assert watcher.view().busy_ratio() is None
    assert len(readers) == 1


def test_a_forked_process_begins_anew(readers: list[Fake]) -> None:
    watcher = watching(readers)
    view = watcher.view()
    pid = os.fork()
    if pid == 0:
        view.close()
        mine = watcher.view()
        ok = len(readers) == 2 and len(nvml_threads()) == 1 and view.gpus == ()
        mine.close()
        os._exit(0 if ok else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert len(nvml_threads()) == 1
    view.close()


def test_a_tuned_loader_asks_and_stops_asking(readers: list[Fake]) -> None:
    from dpex.autotune.config import AutotuneConfig
    from dpex.autotune.runtime.allowed import Limits
    from dpex.autotune.runtime.tuner import Tuner
    from dpex.autotune.types import Settings

    watcher = watching(readers)
    tuner = Tuner(AutotuneConfig(), Settings(local=1, prefetch=2), Limits(), gpu_view=watcher.view)
    assert readers == []

    class Engine:
        closed = True

    engine: Any = Engine()
    tuner.watch(engine)
    assert len(readers) == len(nvml_threads()) == 1
    tuner.leave(engine)
    assert nvml_threads() == []


def test_this_process_has_no_thread_without_a_gpu() -> None:
    import torch

    if torch.version.cuda is not None:
        pytest.skip("torch was built with CUDA")
    assert view() is None
    assert nvml_threads() == []
