"""The labels of the metrics, and the values that each may have: few, and known here. PURE."""

from __future__ import annotations

from dataclasses import dataclass

from dpex.core.names import KNOBS, POOLS, REMOTE, WORKER_POOLS
from dpex.measure.wait_causes import CAUSES


@dataclass(frozen=True, kw_only=True)
class Label:
    """A label's name, and the values it may have; without ``values`` it is open, with ``most`` of them at a time."""

    name: str
    values: tuple[str, ...] = ()
    most: int = 1
    help: str = ""


STATES = ("wait", "transfer", "work")
STAGES = ("load", "collate", "encode")
PATHS = ("shm", "network", "object_store", "h2d", "device")
PARTS = ("copy", "transform", "wait")

LOADER = Label(name="loader", most=4, help='the loader\'s `name=`, else "loader-1" and so on')
STATE = Label(name="state", values=STATES, help="exclusive; all three together are the wall time of all passes")
CAUSE = Label(name="cause", values=CAUSES, help='exclusive; all of them together are `state="wait"`')
POOL = Label(name="pool", values=POOLS, help="where batches are made: the training process, this machine, the cluster")
WORKER_POOL = Label(name="pool", values=WORKER_POOLS, help="where workers are: this machine, the cluster")
CLUSTER = Label(name="pool", values=(REMOTE,), help="the cluster: only from there batches come over a network")
OTHERS = "others"
MACHINE = Label(
    name="machine", most=9, help=f'a machine of the cluster; beyond the first eight all together are "{OTHERS}"'
)
STAGE = Label(name="stage", values=STAGES, help="`dataset[i]`; the collate function; writing the batch into a slot")
PATH = Label(
    name="path", values=PATHS, help="shared memory, a connection, Ray's object store, page-locked memory, device"
)
PART = Label(name="part", values=PARTS, help="copies; `device_transform`; the training stream waiting for them")
ERROR = Label(
    name="kind", values=("batch", "worker", "timeout"), help="user's code failed, workers were lost, `timeout=`"
)
KNOB = Label(name="knob", values=KNOBS, help="workers here, workers on the cluster, prefetch")
DIRECTION = Label(name="direction", values=("up", "down"))
GPU = Label(name="gpu", most=8, help="the GPU's UUID")
BUS = Label(name="direction", values=("rx", "tx"), help="rx: to the GPU, tx: from it")
COLLECTOR = Label(name="collector", values=("loaders", "gpu"))
