"""Which nodes are left alone, and for how long: on a clock that the tests set."""

from __future__ import annotations

from dpex.pools.ray.failing_nodes import FAILURES, FIRST_S, LONGEST_S, WITHIN_S, FailingNodes


def fail(nodes: FailingNodes, *times: float, node: str = "a") -> list[bool]:
    return [nodes.failed(node, f"machine-{node}", "signal 9", at) is not None for at in times]


def test_failures_far_apart_are_nothing() -> None:
    nodes = FailingNodes()
    assert not any(fail(nodes, *(at * WITHIN_S for at in range(20))))
    assert nodes.left_alone(20 * WITHIN_S) == {}


def test_a_node_that_fails_repeatedly_is_left_alone_and_comes_back() -> None:
    nodes = FailingNodes()
    assert fail(nodes, *range(FAILURES)) == [False] * (FAILURES - 1) + [True]
    left_at = FAILURES - 1
    (told,) = nodes.left_alone(left_at).values()
    assert told.place == "machine-a"
    for part in ("machine-a", f"{FIRST_S:.0f} s", f"{FAILURES} times", "signal 9"):
        assert part in told.why
    assert "a" in nodes.left_alone(left_at + FIRST_S - 0.1)
    assert nodes.left_alone(left_at + FIRST_S) == {}


def test_nodes_are_counted_apart() -> None:
    nodes = FailingNodes()
    for number in range(FAILURES - 1):
        assert not any(fail(nodes, float(number), node=name)[0] for name in "abc")
    assert fail(nodes, float(FAILURES), node="b") == [True]
    assert list(nodes.left_alone(float(FAILURES))) == ["b"]


def test_one_that_fails_again_soon_is_left_alone_for_twice_as_long_up_to_a_limit() -> None:
    nodes, now, pause_s = FailingNodes(), 0.0, FIRST_S
    assert fail(nodes, *[now] * FAILURES)[-1]
    for _ in range(10):
        now += pause_s
        assert fail(nodes, now) == [True]
        pause_s = min(LONGEST_S, 2 * pause_s)
        assert "a" in nodes.left_alone(now + pause_s - 0.1)
        assert nodes.left_alone(now + pause_s) == {}


def test_one_that_went_well_for_long_begins_anew() -> None:
    nodes = FailingNodes()
    assert fail(nodes, *[0.0] * FAILURES)[-1]
    later = FIRST_S + WITHIN_S
    assert fail(nodes, later) == [False]
    assert fail(nodes, *[later + 1] * (FAILURES - 1))[-1]
    assert nodes.left_alone(later + 1 + FIRST_S) == {}
