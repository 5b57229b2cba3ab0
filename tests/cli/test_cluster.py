"""`dpex cluster`: what it shows, of values and of a real cluster, and what it says where there is none."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from shared_ray import SharedRay

from dpex.cli.cluster import NO_LOADERS, ClusterNode, cluster_screen
from dpex.pools.ray.shares import Claim
from dpex.system.ray_package import available_resources_per_node

ROOT = Path(__file__).parents[2]
NODES = [ClusterNode(name="a", cpus=4.0, free=0.0), ClusterNode(name="b", cpus=8.0, free=2.5)]


def text_of(shown: Any) -> str:
    console = Console(width=160, record=True, file=sys.stderr)
    console.print(shown)
    return console.export_text()


def test_nodes_and_loaders_are_shown_who_lacks_most_first() -> None:
    loaders = {
        "id[/]le": (Claim(useful=2, most=12, requested=2, running=2), 2),
        "hungry": (Claim(useful=16, most=12, requested=8, running=4, weight=2.0), 8),
    }
    lines = [line.split() for line in text_of(cluster_screen(NODES, loaders)).splitlines()]
    assert ["Ray", "cluster:", "2", "nodes,", "12", "CPUs,", "2.5", "free"] in lines
    assert ["b", "8", "5.5", "2.5"] in lines
    hungry, idle = ["hungry", "4", "8", "8", "16", "1", "2"], ["id[/]le", "2", "2", "2", "2", "1", "1"]
    assert lines.index(hungry) < lines.index(idle)


def test_a_cluster_without_loaders_says_so() -> None:
    assert NO_LOADERS.split() == text_of(cluster_screen(NODES, {})).split("\n\n")[-1].split()


def test_where_nothing_answers_the_remedy_is_named() -> None:
    command = [sys.executable, "-m", "dpex", "cluster", "--once", "--address", "127.0.0.1:1"]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert ended.returncode == 1
    assert "no Ray cluster answers at address='127.0.0.1:1'" in ended.stderr
    assert "--address" in ended.stderr


@pytest.mark.ray
def test_a_real_cluster_is_shown_from_outside(shared_ray: SharedRay) -> None:
    free = {free_cpus()}
    command = [sys.executable, "-m", "dpex", "cluster", "--once", "--address", shared_ray.address]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)
    free.add(free_cpus())
    assert ended.returncode == 0, ended.stderr
    assert any(f"Ray cluster: 3 nodes, 4 CPUs, {few:g} free" in ended.stdout for few in free), ended.stdout
    assert "No loader divides this cluster now" in ended.stdout


def free_cpus() -> float:
    """What agents that are parked leave."""
    return sum(node.get("CPU", 0.0) for node in available_resources_per_node().values())
