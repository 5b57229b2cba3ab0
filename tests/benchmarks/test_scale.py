"""The page on scale: what the simulation says where the answer is known, and that the page shows the kept results."""

import json

import pytest

from benchmarks.parts import places, rewritten
from benchmarks.scale import __main__ as scale
from benchmarks.scale import page
from benchmarks.scale.model import Cluster, Simulation


def test_few_nodes_reach_the_rate_of_their_workers() -> None:
    found = Simulation(Cluster(nodes=4, workers=4, batch_s=0.064, thread_s=0.0001)).run(10.0)
    assert found.rate == pytest.approx(4 * 4 / 0.064, rel=0.01)


def test_many_nodes_reach_the_rate_of_the_training_thread() -> None:
    found = Simulation(Cluster(nodes=64, batch_s=0.01, thread_s=0.001)).run(5.0)
    assert found.rate == pytest.approx(1000, rel=0.02)
    assert found.thread_share > 0.95


def test_large_batches_reach_the_rate_of_the_link() -> None:
    found = Simulation(Cluster(nodes=16, nbytes=10_000_000, trainer_bytes_s=5e8)).run(10.0)
    assert found.rate == pytest.approx(50, rel=0.03)


def test_what_a_dead_node_held_is_made_once_again() -> None:
    found = Simulation(Cluster(nodes=8, deaths_per_hour=600.0, down_s=2.0)).run(30.0)
    assert found.remade > 0
    assert found.twice == 0


@pytest.mark.skipif(not scale.KEPT.exists(), reason="no results are kept")
def test_the_scale_page_has_the_kept_tables() -> None:
    text, tables = page.DOCUMENT.read_text(), page.tables(json.loads(scale.KEPT.read_text()))
    assert set(tables) <= places(text)
    assert rewritten(text, tables) == text
