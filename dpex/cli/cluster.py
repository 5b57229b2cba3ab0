"""``dpex cluster``: show the nodes of a Ray cluster, and the workers that each loader has there, in a terminal."""

from __future__ import annotations

import argparse
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rich.console import Console, Group, RenderableType
from rich.text import Text

from dpex.cli.main import add_command, redraw, table
from dpex.errors import ClusterError
from dpex.pools.ray.shares import Claim
from dpex.system.ray_package import is_ray_connected
from dpex.system.user_warnings import replace_unencodable

NO_LOADERS = (
    'No loader divides this cluster now. Loaders with num_workers="auto" and distribute_mode=True or "auto" divide it '
    "while they are iterated over."
)
_DESCRIPTION = """
Show how training processes use a Ray cluster, every second: its nodes, and for each loader that tunes itself its
workers, its share, and the workers that would speed up training.
"""


class ClusterNode(NamedTuple):
    """A node: its name, its number of CPUs, and the number of free CPUs."""

    name: str
    cpus: float
    free: float


def living_cluster_nodes() -> list[ClusterNode]:
    """Return the nodes that are alive, by name. Asks Ray."""
    from dpex.pools.ray.cluster import living_nodes
    from dpex.system.ray_package import available_resources_per_node

    free = available_resources_per_node()
    found = [
        ClusterNode(
            name=f"{node['NodeManagerHostname']} ({node['NodeID'][:8]})",
            cpus=node["Resources"].get("CPU", 0.0),
            free=free.get(node["NodeID"], {}).get("CPU", 0.0),
        )
        for node in living_nodes()
    ]
    return sorted(found, key=lambda node: node.name)


def cluster_screen(found: Sequence[ClusterNode], loaders: Mapping[str, tuple[Claim, int]]) -> RenderableType:
    """Return the nodes, then the loaders in the order of their missing workers, most first."""
    cpus, free = sum(node.cpus for node in found), sum(node.free for node in found)
    title = f"Ray cluster: {len(found)} node{'' if len(found) == 1 else 's'}, {cpus:g} CPUs, {free:g} free"
    rows = [(one.name, f"{one.cpus:g}", f"{one.cpus - one.free:g}", f"{one.free:g}") for one in found]
    claims = sorted(loaders.items(), key=lambda one: (-one[1][0].lacking, one[0]))
    shares = [
        (name, one.running, one.requested, granted, one.useful, f"{one.cpus:g}", f"{one.weight:g}")
        for name, (one, granted) in claims
    ]
    headings = ("loader", "workers", "asked for", "share", "would pay", "CPUs each", "weight")
    divided = table(headings, shares) if shares else Text(NO_LOADERS)
    return Group(Text(title, style="bold"), "", table(("node", "CPUs", "in use", "free"), rows), "", divided)


def _draw_cluster() -> RenderableType:
    from dpex.pools.ray.shares import shares

    return cluster_screen(living_cluster_nodes(), shares())


def register(subparsers: Any) -> None:
    summary = "watch a Ray cluster: who has its workers, and who waits for more"
    found = add_command(subparsers, "cluster", summary=summary, description=_DESCRIPTION)
    found.add_argument("--address", help="address of the cluster (default: $RAY_ADDRESS, else the one on this machine)")
    found.add_argument("--once", action="store_true", help="print it once and exit")
    found.set_defaults(command=show_cluster)


def show_cluster(
    options: argparse.Namespace, console: Console | None = None, stop: threading.Event | None = None
) -> int:
    """Show the cluster until ``stop`` is set, or q or Ctrl-C is pressed. Return the exit status."""
    from dpex.pools.ray.cluster import join

    try:
        if not is_ray_connected():
            join(options.address)
    except (ClusterError, ImportError) as error:
        print(f"dpex cluster: {error}", file=sys.stderr)
        return 1
    replace_unencodable(sys.stdout)
    console = console or Console()
    if options.once:
        console.print(_draw_cluster())
        return 0
    redraw(_draw_cluster, console, stop)
    return 0
