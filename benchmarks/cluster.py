"""Ray clusters on this machine, for workers on other nodes.

The first raylet has no processors to give: it is the trainer's node. All workers are therefore on the others, each of
which has as many CPUs to give as it is told, whatever the machine has.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module

OBJECT_STORE_BYTES = 2 * 2**30


@contextmanager
def raylets(cpus: Sequence[int], store_bytes: int | None = None) -> Iterator[str]:
    """Start the trainer's node and one for each of `cpus`, yield the address, stop all. `cpus`: how many one-CPU actors
    each takes. `store_bytes`: of the object store of each; all together have `OBJECT_STORE_BYTES` if None."""
    from ray.cluster_utils import Cluster

    store_bytes = store_bytes or OBJECT_STORE_BYTES // max(1, len(cpus))
    store = {"object_store_memory": store_bytes, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **store})
    try:
        for count in cpus:
            cluster.add_node(num_cpus=count, object_store_memory=store["object_store_memory"])
        cluster.wait_for_nodes()
        yield cluster.address
    finally:
        cluster.shutdown()


@contextmanager
def connected(cpus: Sequence[int], store_bytes: int | None = None) -> Iterator[None]:
    """Make a cluster of `raylets` with these arguments and `join` it; do nothing if there are no `cpus`."""
    if not cpus:
        yield
        return
    import ray

    with raylets(cpus, store_bytes) as address:
        join(address)
        try:
            yield
        finally:
            ray.shutdown()


def join(address: str) -> None:
    """Connect this process to the cluster as a trainer that shares no machine with the other nodes."""
    import ray

    part_from_other_nodes()
    ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)


def part_from_other_nodes() -> None:
    """Have dpex take agents for those of other machines: their batches come over loopback, not in shared memory."""
    for module, name in (("connection", "this_machine"), ("same_machine", "machine")):  # the latter before 2026-11-26
        with suppress(ImportError):
            setattr(import_module(f"dpex.pools.agent.{module}"), name, lambda: "")
