"""The comparison of two checkouts, and what every consumer of the benchmark does with a batch. Nothing is timed."""

from __future__ import annotations

import time
from collections import namedtuple
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from benchmarks import consumer, tables
from benchmarks.before_after import Pair, contestants, line
from benchmarks.course import Course
from benchmarks.machine import last_level_cache_bytes
from benchmarks.process import ROOT, MeasurementError, Surroundings, run, with_dpex_of


def course(rate: float, settled: float) -> Course:
    """Ten seconds at `settled` a second in the second half."""
    batches = round(10 * rate)
    return Course(batches=batches, seconds=10.0, waited_s=0.0, marks=((5.0, round(batches - 5 * settled)),))


def test_ratios_are_new_over_base_within_a_round() -> None:
    pair = Pair(base=course(80, 100), new=course(72, 50))
    assert pair.whole == pytest.approx(0.9)
    assert pair.settled == pytest.approx(0.5)


def test_a_line_quotes_the_median_and_the_range_of_the_ratios() -> None:
    pairs = [Pair(base=course(100, 100), new=course(rate, rate)) for rate in (80, 100, 90)]
    assert "0.900 (0.800 to 1.000)" in line("row", pairs)


def test_processor_time_is_compared_where_both_sides_know_it() -> None:
    base, new = (replace(course(1, 1), batch_cpu_s=seconds) for seconds in (0.2, 0.1))
    assert Pair(base=base, new=new).cpu == 0.5
    assert Pair(base=course(1, 1), new=new).cpu is None
    assert line("row", [Pair(base=base, new=new)]).endswith("0.500 (0.500 to 0.500)")


def test_auto_has_no_seeding_to_choose() -> None:
    found = [(one.workers, one.seeding) for one in contestants(["0", "auto", "2"], ["worker", "batch"])]
    assert found == [(0, "worker"), (0, "batch"), (2, "worker"), (2, "batch"), ("auto", None)]


def test_the_measured_process_has_the_dpex_of_the_checkout_and_these_benchmarks(tmp_path: Path) -> None:
    (tmp_path / "dpex").mkdir()
    (tmp_path / "dpex" / "__init__.py").write_text("")
    told = "import dpex, benchmarks; print(dpex.__file__, benchmarks.__file__)"
    with with_dpex_of(tmp_path) as surroundings:
        dpex, benchmarks = (Path(place).resolve() for place in run(surroundings, "-c", told, limit_s=60).split())
    assert dpex.is_relative_to(tmp_path.resolve())
    assert benchmarks.is_relative_to(ROOT)


def test_a_folder_without_dpex_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MeasurementError, match="came from"), with_dpex_of(tmp_path):
        pass


def test_a_failed_process_is_quoted_and_a_hung_one_is_ended() -> None:
    with pytest.raises(MeasurementError, match="no such luck"):
        run(Surroundings(), "-c", "raise SystemExit('no such luck')", limit_s=60)
    with pytest.raises(MeasurementError, match="nothing after"):
        run(Surroundings(), "-c", "import threading; threading.Event().wait()", limit_s=0.5)


def test_what_a_process_leaves_behind_neither_delays_nor_outlives_the_measurement() -> None:
    told = "import os, signal; child = os.fork(); child or signal.pause(); print(child)"
    child = int(run(Surroundings(), "-c", told, limit_s=60))
    with suppress(psutil.NoSuchProcess):
        orphan = psutil.Process(child)
        deadline_s = time.monotonic() + 30  # a signal may arrive late
        while orphan.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline_s


Point = namedtuple("Point", "x y")


@pytest.fixture
def pages_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of bytes that each large array was read for."""
    read: list[int] = []
    whole = consumer._read_bytes

    def counting(flat: np.ndarray) -> int:
        read.append(flat.size)
        return whole(flat)

    monkeypatch.setattr(consumer, "_read_bytes", counting)
    return read


def test_every_array_of_a_batch_is_read_whatever_its_nesting(pages_read: list[int]) -> None:
    tensor, array = torch.zeros(3, 4096), np.zeros((2, 4096), np.uint8)
    consumer.read_pages({"a": [tensor, (array, "word")], "b": Point(tensor, 1)})
    assert pages_read == [3 * 4096 * 4, 2 * 4096, 3 * 4096 * 4]


def test_an_array_that_is_not_contiguous_is_read_as_well(pages_read: list[int]) -> None:
    consumer.read_pages([torch.zeros(64, 128).t(), np.zeros((64, 128)).T])
    assert pages_read == [64 * 128 * 4, 64 * 128 * 8]


def test_small_empty_and_unusual_tensors_can_be_read() -> None:
    consumer.read_pages([torch.zeros(0), torch.zeros(5), torch.zeros(5000, dtype=torch.bfloat16), np.zeros(0)])


def test_a_byte_of_every_page_and_the_last_one_are_looked_at() -> None:
    flat = np.zeros(3 * consumer.PAGE_BYTES, np.uint8)
    for place in (0, consumer.PAGE_BYTES, 2 * consumer.PAGE_BYTES, len(flat) - 1):
        flat[:] = 0
        flat[place] = 7
        assert consumer._read_bytes(flat) == 7


def test_a_tensor_elsewhere_is_refused() -> None:
    with pytest.raises(TypeError, match="meta"):
        consumer.read_pages(torch.zeros(5, device="meta"))


@pytest.mark.parametrize(("sizes", "expected"), [({"Unified": "32768K"}, 2**25), ({"Instruction": "64K"}, 2**25)])
def test_the_last_level_cache_is_read_from_the_system(tmp_path: Path, sizes: dict[str, str], expected: int) -> None:
    for number, (kind, size) in enumerate([("Data", "32K")] * ("Unified" in sizes) + list(sizes.items())):
        (tmp_path / f"index{number}").mkdir()
        (tmp_path / f"index{number}" / "type").write_text(f"{kind}\n")
        (tmp_path / f"index{number}" / "size").write_text(f"{size}\n")
    assert last_level_cache_bytes(tmp_path) == expected


def test_a_table_is_larger_than_the_cache_and_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DPEX_BENCH_DATA", str(tmp_path))
    monkeypatch.setattr(tables, "last_level_cache_bytes", lambda: 10_000)
    table = tables.Table.beyond_cache("t", (5,))
    assert table.rows * 20 >= 4 * 10_000
    rows = table.open()
    assert rows.shape == (table.rows, 5)
    made = table.path.stat()
    assert torch.equal(rows, table.open())
    assert table.path.stat() == made
    assert [path.name for path in tmp_path.iterdir()] == [table.path.name]


def test_rows_of_a_table_are_scattered_and_all_have_their_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DPEX_BENCH_DATA", str(tmp_path))
    table = tables.Table(name="t", rows=7, shape=(2,))
    dataset = tables.Rows(table, length=100)
    again = dataset.__reduce__()[0](*dataset.__reduce__()[1])
    assert {tuple(again.row(index).tolist()) for index in range(7)} == {tuple(row) for row in table.open().tolist()}
