"""`python -m tests` divides the tests in two: those that may run beside others, and those that may not."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests import __main__ as runner
from tests import sharing

OK, FAILED, INTERRUPTED, NONE = 0, 1, 2, 5


def test_every_test_is_in_one_of_both_runs() -> None:
    shared, alone = runner.runs([])
    assert shared[-2:] == ["-m", "not alone"]
    assert alone == ["-m", "alone"]


def test_arguments_are_pytests_and_marks_are_chosen_among_both() -> None:
    shared, alone = runner.runs(["-x", "tests/parity", "-m", "ray or slow", "-n", "3"])
    assert shared[-6:] == ["-m", "(ray or slow) and not alone", "-x", "tests/parity", "-n", "3"]
    assert alone == ["-m", "(ray or slow) and alone", "-x", "tests/parity", "-n", "3"]


@pytest.mark.parametrize(("cpus", "processes"), [(0.5, 1), (1, 2), (2, 4), (4, 8), (16, 8), (192, 8)])
def test_a_machine_has_as_many_processes_as_it_can_feed(
    monkeypatch: pytest.MonkeyPatch, cpus: float, processes: int
) -> None:
    monkeypatch.setattr(runner, "usable_cpus", lambda: cpus)
    assert runner.process_count() == processes


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_modules_with_ray_are_divided_evenly(processes: int) -> None:
    scopes = sharing.ray_scopes(processes)
    assert "tests/test_cluster.py" in scopes
    assert all(sharing.starts_ray(module) for module in scopes)
    took = Counter()
    for module, scope in scopes.items():
        took[scope] += sharing.seconds(module)
    assert len(took) == processes
    longest = max(map(sharing.seconds, scopes))
    assert max(took.values()) <= max(longest, 1.5 * min(took.values()))


def test_modules_whose_ray_is_in_another_process_run_beside_the_others() -> None:
    scopes = sharing.ray_scopes(2)
    assert "tests/test_ray_heads.py" not in scopes
    assert "tests/test_clean_start_beside_ray.py" in scopes


def test_where_only_those_marked_alone_run_other_modules_are_not_imported(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text("import pytest\n@pytest.mark.alone\ndef test_good(): pass\n")
    (tmp_path / "test_other.py").write_text("raise ImportError\n")
    plugins = ["-p", "no:cacheprovider", "-p", "tests.sharing", "--rootdir", str(tmp_path), "-q"]
    assert runner.run([*plugins, "-m", "alone", str(tmp_path)])[0] == OK
    assert runner.run([*plugins, "-m", "not alone", str(tmp_path)])[0] == INTERRUPTED


def test_modules_that_take_long_are_there() -> None:
    assert [module for module in sharing.SECONDS if not (sharing.ROOT / module).exists()] == []


@pytest.mark.parametrize(
    ("codes", "arguments", "code", "count"),
    [
        ((OK, OK), [], OK, 2),
        ((FAILED, OK), [], FAILED, 2),
        ((OK, FAILED), [], FAILED, 2),
        ((FAILED, OK), ["-x"], FAILED, 1),
        ((FAILED, OK), ["--maxfail=2"], FAILED, 1),
        ((INTERRUPTED, OK), [], INTERRUPTED, 1),
        ((NONE, OK), [], OK, 2),
        ((FAILED, NONE), [], FAILED, 2),
        ((NONE, NONE), [], NONE, 2),
    ],
)
def test_the_exit_code_is_that_of_the_worse_run(
    monkeypatch: pytest.MonkeyPatch, codes: tuple[int, int], arguments: list[str], code: int, count: int
) -> None:
    made = iter(codes)
    ran = []
    monkeypatch.setattr(runner, "run", lambda each: (ran.append(each), (next(made), []))[1])
    assert (runner.main(arguments), len(ran)) == (code, count)


MOST = runner.MOST_AGAIN


@pytest.mark.parametrize(
    ("shared", "alone", "again", "code"),
    [
        ((FAILED, 1), (OK, 0), OK, OK),
        ((FAILED, MOST), (OK, 0), OK, OK),
        ((FAILED, 1), (OK, 0), FAILED, FAILED),
        ((FAILED, 1), (FAILED, MOST), OK, OK),
        ((OK, 0), (FAILED, 1), OK, OK),
        ((OK, 0), (FAILED, 1), FAILED, FAILED),
        ((FAILED, 1), (FAILED, MOST + 1), OK, FAILED),
        ((FAILED, 1), (NONE, 0), OK, OK),
        ((FAILED, 1), (INTERRUPTED, 0), None, INTERRUPTED),
        ((FAILED, MOST + 1), (OK, 0), None, FAILED),
        ((FAILED, 0), (OK, 0), None, FAILED),
    ],
)
def test_a_few_that_failed_run_again(
    monkeypatch: pytest.MonkeyPatch, shared: tuple[int, int], alone: tuple[int, int], again: int | None, code: int
) -> None:
    """Each run is an exit code, and how many of its tests failed."""
    outcomes = [
        (each, [f"tests/test_{name}.py::test_{number}" for number in range(failed)])
        for name, (each, failed) in (("shared", shared), ("alone", alone))
    ]
    chosen = [name for _, names in outcomes if len(names) <= MOST for name in names]
    made = iter([*outcomes, (again, chosen)])
    ran = []
    monkeypatch.setattr(runner, "run", lambda each: (ran.append(each), next(made))[1])
    assert runner.main([]) == code
    assert ran[2:] == ([] if again is None else [chosen])


def test_what_failed_is_known_by_name(tmp_path: Path) -> None:
    module = tmp_path / "test_some.py"
    module.write_text("def test_good(): pass\ndef test_bad(): assert False\ndef test_setup(nothing): pass\n")
    plugins = ["-p", "no:cacheprovider", "-p", "tests.failures", "--rootdir", str(tmp_path), "-q"]
    code, failed = runner.run([*plugins, str(module)])
    assert (code, failed) == (FAILED, ["test_some.py::test_bad", "test_some.py::test_setup"])
