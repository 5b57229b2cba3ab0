"""Gather the reports of a job's ranks, by a collective operation or at the end of a launch by torchrun.

Near the end of a launch, the process group may have ended already. But torchrun, and so `accelerate launch`, keeps a
key-value store at ``MASTER_ADDR`` and ``MASTER_PORT`` until the last process has ended.
Each rank writes its report there, as JSON. Rank 0 reads the reports of all nodes.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from dpex.diagnose.job import JobDiagnosis, RankReport, judge
from dpex.system.clock import monotonic
from dpex.system.cpus import rank, ranks

if TYPE_CHECKING:
    from dpex.diagnose.diagnosis import Diagnosis

PATIENCE_S = 10.0
"""Maximum seconds that rank 0 waits before its exit for the reports of all other ranks."""


def of_group(found: Diagnosis, group: Any) -> JobDiagnosis:
    """Return the verdict on the ranks of a process group. This is a collective call, which every rank must make."""
    import torch.distributed as dist

    own = RankReport.of(found, dist.get_rank(), platform.node())
    reports: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(reports, own.sent(), group=group)
    return judge([own if one["rank"] == own.rank else RankReport(**one) for one in reports])


def of_launch(found: Sequence[tuple[str, RankReport]], environ: Mapping[str, str]) -> JobDiagnosis | None:
    """Return the verdict on the ranks of a launch. Return None if this is not rank 0, or without torchrun's store.

    Args:
        found: Pairs of a loader's description and its report, the most important loader first.
        environ: The environment variables that the launcher set.

    Raises:
        RuntimeError: The store cannot be reached.
    """
    count = ranks(environ)
    if count < 2 or environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    address, port = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
    store = TCPStore(address, port, is_master=False, timeout=timedelta(seconds=PATIENCE_S))
    keys = [f"dpex/diagnosis/{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{number}" for number in range(count)]
    if rank(environ):
        store.set(keys[rank(environ)], json.dumps([(words, report.sent()) for words, report in found]))
        return None
    if not found:
        return None
    words, own = found[0]
    reports, missing, deadline = [own], [], monotonic() + PATIENCE_S
    for number in range(1, count):
        try:
            store.wait([keys[number]], timedelta(seconds=max(0.1, deadline - monotonic())))
        except RuntimeError:
            missing.append(number)
            continue
        alike = [RankReport(**one) for said, one in json.loads(store.get(keys[number])) if said == words]
        reports += [max(alike, key=lambda one: one.batches)] if alike else []
        missing += [] if alike else [number]
    return judge(reports, missing)
