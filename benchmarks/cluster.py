"""A Ray cluster of two raylets on this machine, for the remote rows.

The first raylet has no processors to give: it is the trainer's node. All workers are therefore on the
second, and every batch crosses from one object store to the other, as between two machines.
"""

from collections.abc import Iterator
from contextlib import contextmanager

OBJECT_STORE_BYTES = 2 * 2**30


@contextmanager
def two_raylets(cpus: int) -> Iterator[str]:
    """Start both, yield the address, stop both. `cpus`: how many one-CPU actors the second raylet takes."""
    from ray.cluster_utils import Cluster

    store = {"object_store_memory": OBJECT_STORE_BYTES, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **store})
    try:
        cluster.add_node(num_cpus=cpus, object_store_memory=OBJECT_STORE_BYTES)
        cluster.wait_for_nodes()
        yield cluster.address
    finally:
        cluster.shutdown()
