"""Which nodes get no workers, and for how long: on a clock that the tests set."""

from dpex.pools.ray.cluster import FAILURES, PAUSE_S, WITHIN_S, AvoidedNode, AvoidedNodes, without


def fail(nodes: AvoidedNodes, *times: float, node: str = "a") -> list[bool]:
    return [nodes.failed(node, f"machine-{node}", "signal 9", at) for at in times]


def test_failures_far_apart_are_nothing() -> None:
    nodes = AvoidedNodes()
    assert not any(fail(nodes, *(at * WITHIN_S for at in range(20))))
    assert nodes.now("images", 20 * WITHIN_S) == {}


def test_a_node_that_fails_repeatedly_is_excluded_for_a_while() -> None:
    nodes = AvoidedNodes()
    assert fail(nodes, *range(FAILURES)) == [False] * (FAILURES - 1) + [True]
    left_at = FAILURES - 1
    (found,) = nodes.now("images", left_at).values()
    assert found.place == "machine-a"
    for part in ("machine-a", f"{PAUSE_S:.0f} s", f"{FAILURES} times", "signal 9"):
        assert part in without([found])
    assert "a" in nodes.now("images", left_at + PAUSE_S - 0.1)
    assert nodes.now("images", left_at + PAUSE_S) == {}
    assert not fail(nodes, left_at + PAUSE_S)[0]


def test_nodes_are_counted_apart() -> None:
    nodes = AvoidedNodes()
    for number in range(FAILURES - 1):
        assert not any(fail(nodes, float(number), node=name)[0] for name in "abc")
    assert fail(nodes, float(FAILURES), node="b") == [True]
    assert list(nodes.now("images", float(FAILURES))) == ["b"]


def test_a_node_that_cannot_serve_one_dataset_may_serve_another() -> None:
    nodes = AvoidedNodes()
    nodes.unfit("a", "machine-a", "images", "no files")
    assert without(nodes.now("images", 1e9).values()).startswith("node machine-a gets no workers: no files. Install")
    assert nodes.now("texts", 0.0) == {}


def test_nodes_with_one_reason_are_told_together() -> None:
    """A package that no node of a cluster has is one reason, however many nodes there are."""
    lacking = [AvoidedNode(f"n{number}", ": no module", 0.0) for number in range(5)]
    failing = AvoidedNode("n7", " for a while", 1.0)
    assert without([failing, *lacking]) == (
        "nodes n0, n1, n2 and 2 more get no workers: no module; node n7 gets no workers for a while"
    )
