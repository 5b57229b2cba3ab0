"""Workers that are Ray actors on a cluster. With `cluster` and `worker_actor`, all that dpex knows of Ray.

A host is an actor: asked for, placed on a node, prepared there (the first of a node is a probe for the others), up. One
call carries a group of tickets; several calls are in flight for each host, so that the way there and back is hidden.
Ray answers in a thread of its own, which copies large buffers out of the object store into memory that is already
faulted in, puts the answer on a list and wakes the trainer through a pipe (see `inbox`). All else is done by the
trainer's thread in `poll`.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import pickle
import secrets
import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import Any

import numpy as np

from dpex.core.schedule import Ticket
from dpex.measure.consumer_time import NodeSums
from dpex.pools.base import Event, Gone, LaneCounts, LaneTimes, Made, Note, Released, Snapshot, Up
from dpex.pools.ray.actor import actor_class, actor_options, cause_of_death, needs_of
from dpex.pools.ray.cluster import Actor, connect, kill, release, stream_address
from dpex.pools.ray.handles import Call, Host, message, node_sums, transit_s
from dpex.pools.ray.results import Inbox, Landed
from dpex.pools.ray.tcp_stream import StreamBrokenError
from dpex.pools.ray.worker_actor import END, Contents, Order, Report, Source, codec_signature
from dpex.system.clock import monotonic
from dpex.transport.pickling import changed_collate_entries, cloud_dumps, pack
from dpex.worker.core import RngState, WorkerSetup

logger = logging.getLogger("dpex")

FIRST_HOST = 1_000_000
CALLS_IN_FLIGHT = 4
"""A host takes no more than this many messages at a time."""
_FAILED_STARTS = 3
_LOOK_EVERY_S = 1.0


class RemoteLane:
    """See the module; implements `dpex.pools.base.Lane`.

    ``failed`` says why no host can be had at present, or is None; it may change either way while the cluster does.

    Raises `ClusterError` where the cluster cannot be reached and `ShippingError` where the dataset cannot travel.
    """

    name = "remote"

    def __init__(
        self,
        setup: WorkerSetup,
        *,
        head_address: str,
        worker_resources: Mapping[str, Any] | None,
        runtime_env: Mapping[str, Any] | None,
        shared_queue: bool,
        first_hosts: int,
        probe_index: Any = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counts = LaneCounts()
        self.times = LaneTimes()
        self.failed: str | None = None
        self.crashes = 0
        self._shared = shared_queue
        self._probe_index = probe_index
        self._kind = f"{type(setup.dataset).__module__}.{type(setup.dataset).__qualname__}"
        self._hosts: dict[int, Host] = {}
        self._next_host = FIRST_HOST
        self._next_call = 0
        self._epoch = 0
        self._events: deque[Event] = deque()
        self._suspects: set[int] = set()
        self._unreached: set[str] = set()
        self._failed_starts = 0
        self._look_at = 0.0
        self._clock = clock
        self._closed = False
        self._owner = os.getpid()
        parcel = pack(Contents(setup=setup, collate_entries=changed_collate_entries()))
        self._cluster = connect(head_address)
        try:
            self._options = actor_options(worker_resources, runtime_env)
            self._pool_key: Hashable = json.dumps(self._options, sort_keys=True, default=repr)
            header = np.frombuffer(parcel.header, np.uint8)
            self._parcel = [importlib.import_module("ray").put([header, *parcel.buffers])]
            self._inbox = Inbox(self._cluster, stream_address())
            self._avoided = {n: why for (n, kind), why in self._cluster.unfit.items() if kind == self._kind}
            self.resize(first_hosts)
        except BaseException:
            release(self._cluster)
            raise

    # -- size ----------------------------------------------------------------------------------------------------

    def resize(self, wanted: int) -> None:
        """See `Lane.resize`."""
        self.counts.wanted = wanted
        staying = [host for host in self._hosts.values() if not host.leaving]
        if len(staying) < wanted:
            self._add_hosts(wanted - len(staying))
        surplus = len(staying) - wanted
        for host in sorted(staying, key=lambda h: (h.stage == "up", -h.number))[: max(0, surplus)]:
            if self._shared or host.stage != "up":
                self._dismiss(host)

    def dismiss(self, host: int) -> None:
        """See `Lane.dismiss`."""
        found = self._hosts.get(host)
        if found is not None:
            self._dismiss(found)

    def _dismiss(self, host: Host) -> None:
        host.leaving = True
        if host.stage != "up" or host.idle:
            self._part(host)

    def _part(self, host: Host) -> None:
        """End a host that holds nothing."""
        kill(host.actor.handle)
        self._forget(host)
        self._events.append(Gone(host.number, (), None, True, "the worker was asked to leave", host.actor.pid))

    def _forget(self, host: Host) -> None:
        del self._hosts[host.number]
        self._inbox.forget(host.number)
        self.counts.requested -= 1
        self.counts.running -= host.stage == "up"
        if not self._closed:
            self._prepare_waiting(host.actor.node)

    def _add_hosts(self, count: int) -> None:
        actors = self._cluster.pool.take(self._pool_key, count)
        for actor in [*actors, *(self._start_actor() for _ in range(count - len(actors)))]:
            number, self._next_host = self._next_host, self._next_host + 1
            index = next(i for i in range(len(self._hosts) + 1) if all(h.index != i for h in self._hosts.values()))
            host = self._hosts[number] = Host(number, index, actor)
            self.counts.requested += 1
            actor.calls = []
            if actor.node is None:
                self._call(host, Call("hello", actor.handle.hello.remote, []))
            else:
                self._placed(host)
        if not self.counts.running:
            self._look_for_nodes()

    def _start_actor(self) -> Actor:
        options = dict(self._options)
        if self._avoided:
            selector = {"ray.io/node-id": f"!in({','.join(sorted(self._avoided))})"}
            options["label_selector"] = {**options.get("label_selector", {}), **selector}
        name = f"dpex-worker-{os.getpid()}-{secrets.token_hex(4)}"
        return Actor(actor_class().options(name=name, **options).remote())

    def _look_for_nodes(self) -> None:
        """Find out whether any node could take a host at all."""
        self._look_at = self._clock() + _LOOK_EVERY_S
        needed = needs_of(self._options)
        with contextlib.suppress(Exception):
            nodes = [node for node in importlib.import_module("ray").nodes() if node["Alive"]]
            fit = [n for n in nodes if all(n["Resources"].get(k, 0) >= v for k, v in needed.items())]
            good = [n for n in fit if n["NodeID"] not in self._avoided]
            if good:
                if self._failed_starts < _FAILED_STARTS:
                    self.failed = None
                return
            reasons = "; ".join(sorted({why for n, why in self._avoided.items()})) if fit else ""
            self._fail(reasons or f"no node of the cluster has {needed}")

    def _look_again(self) -> None:
        """While nobody is up, nodes come and go without an event of ours."""
        if self._hosts and not self.counts.running and self._clock() >= self._look_at:
            self._look_for_nodes()

    def _fail(self, why: str) -> None:
        if self.failed is None:
            self._events.append(Note(f"no worker can run on the Ray cluster: {why}"))
            self._inbox.wake()
        self.failed = why

    # -- preparing -----------------------------------------------------------------------------------------------

    def _placed(self, host: Host) -> None:
        host.stage = "placed"
        node = host.actor.node
        if node in self._avoided:
            self._give_up_on(host)
        else:
            self._prepare_waiting(node)

    def _prepare_waiting(self, node: str | None) -> None:
        """Prepare the hosts of a node: one first, the others when they can share what it has."""
        here = [host for host in self._hosts.values() if host.actor.node == node and node is not None]
        source = next((host.source for host in here if host.source is not None), None)
        known = any(host.stage == "up" for host in here)
        if any(host.stage == "preparing" for host in here) and not known:
            return
        for host in [h for h in here if h.stage == "placed"]:
            self._prepare(host, source, first=not known)
            if not known:
                return  # the others wait for this one

    def _prepare(self, host: Host, source: Source | None, first: bool) -> None:
        host.stage = "preparing"
        host.probing = first and (host.actor.node, self._kind) not in self._cluster.probed
        order = Order(
            shared_queue=self._shared,
            host_index=host.index,
            probe=host.probing,
            probe_index=self._probe_index,
            source=source,
            codec=codec_signature(),
            target=None if host.actor.node in self._unreached else self._inbox.target(host.number),
        )
        prepare = partial(host.actor.handle.prepare.remote, self._parcel, cloud_dumps(order))
        self._call(host, Call("prepare", prepare, []))

    def _said_hello(self, host: Host, answer: tuple[str, str, int]) -> None:
        host.actor.node, host.actor.place, host.actor.pid = answer
        self._placed(host)

    def _prepared(self, host: Host, report: Report | str) -> None:
        unfit = report if isinstance(report, str) else report.unfit
        if unfit is not None or isinstance(report, str):
            self._set_aside(host, unfit or "")
            return
        host.source = report.source
        if report.unreached is not None:
            self._no_stream(host, f"it cannot reach {report.unreached}")
        host.stage = "up"
        self.failed = None
        self._failed_starts = 0
        if host.actor.node is not None:
            self._cluster.probed.add((host.actor.node, self._kind))
        self.counts.running += 1
        self._events.append(Up(host.number))
        self._prepare_waiting(host.actor.node)

    def _no_stream(self, host: Host, why: str) -> None:
        """Large batches of the host's node go through Ray's object store from now on."""
        if host.actor.node is not None and host.actor.node not in self._unreached:
            self._unreached.add(host.actor.node)
            text = f"large batches from node {host.actor.place} travel through Ray's object store: {why}"
            self._events.append(Note(text, warning=False))

    def _set_aside(self, host: Host, why: str) -> None:
        """The host's node cannot serve: nobody goes there any more."""
        node = host.actor.node or ""
        text = f"node {host.actor.place} is set aside: {why}"
        self._avoided[node] = self._cluster.unfit[node, self._kind] = text
        self._events.append(Note(text))
        for other in [h for h in self._hosts.values() if h.actor.node == node and h.stage != "up"]:
            self._give_up_on(other)

    def _give_up_on(self, host: Host) -> None:
        kill(host.actor.handle)
        self._forget(host)
        self._replace()

    def _replace(self) -> None:
        missing = self.counts.wanted - sum(not host.leaving for host in self._hosts.values())
        if missing > 0 and not self._closed and self._failed_starts < _FAILED_STARTS:
            self._add_hosts(missing)

    # -- tickets -------------------------------------------------------------------------------------------------

    @property
    def starts_slowly(self) -> bool:
        """See `Lane.starts_slowly`: an actor's process imports torch first."""
        return True

    def at_work(self) -> int:
        """Hosts that have something to do, at most."""
        return sum(not host.idle for host in self._hosts.values())

    def hosts(self) -> list[int]:
        """See `Lane.hosts`."""
        return [host.number for host in self._hosts.values() if host.stage == "up" and not host.leaving]

    def slots(self) -> int:
        """How many more messages the lane takes now."""
        up = (h for h in self._hosts.values() if h.stage == "up" and not h.leaving)
        return sum(max(0, CALLS_IN_FLIGHT - len(host.calls)) for host in up)

    def send(self, tickets: list[Ticket], epoch: int, host: int | None = None, sent: list[Any] | None = None) -> bool:
        """See `Lane.send`. A message to a named host is always taken, one to anybody while somebody has room."""
        sent = [] if sent is None else sent
        if host is not None:
            sent += (host,)
            self._send(self._hosts[host], tickets, epoch)
            return True
        up = (h for h in self._hosts.values() if h.stage == "up" and not h.leaving and not h.waiting)
        place = min(up, key=lambda h: len(h.calls), default=None)
        if place is None or len(place.calls) >= CALLS_IN_FLIGHT:
            return False
        sent += (place.number,)
        self._send(place, tickets, epoch)
        return True

    def _send(self, host: Host, tickets: list[Ticket], epoch: int) -> None:
        work = host.actor.handle.work.remote
        if self._suspects and any(ticket.number in self._suspects for ticket in tickets):
            for ticket in tickets:  # so that a further death names the one to blame
                self._call(host, Call("work", partial(work, message([ticket], epoch)), [ticket], alone=True))
        else:
            self._call(host, Call("work", partial(work, message(tickets, epoch)), tickets))

    def adopt(self, host: int, logical: int, state: RngState | None) -> None:
        """See `Lane.adopt`."""
        place = self._hosts[host]
        self._call(place, Call("adopt", partial(place.actor.handle.adopt.remote, logical, state), [], logical))

    def release(self, host: int, logical: int) -> None:
        """See `Lane.release`."""
        place = self._hosts[host]
        self._call(place, Call("release", partial(place.actor.handle.release.remote, logical), [], logical))

    def new_epoch(self, epoch: int) -> None:
        """See `Lane.new_epoch`."""
        self._epoch = epoch
        self._inbox.epoch = epoch
        self._suspects.clear()

    def _call(self, host: Host, call: Call) -> None:
        host.waiting.append(call)
        self._submit(host)

    def _submit(self, host: Host) -> None:
        while (call := host.next_call()) is not None:
            self._submit_now(host, call)

    def _submit_now(self, host: Host, call: Call) -> None:
        number, self._next_call = self._next_call, self._next_call + 1
        host.calls[number] = call
        call.sent_at = monotonic()
        call.ref = call.submit()
        self._inbox.expect(call.ref, (host.number, number), call.kind == "work")

    # -- what happened -------------------------------------------------------------------------------------------

    def descriptors(self) -> list[int]:
        """See `Lane.descriptors`: the end of a pipe into which Ray's thread writes."""
        return [self._inbox.descriptor]

    def poll(self) -> deque[Event]:
        """See `Lane.poll`."""
        if self._closed:
            return self._events
        for (number, call_number), answer in self._inbox.take():
            host = self._hosts.get(number)
            if host is None:
                continue  # given up before
            if isinstance(answer, StreamBrokenError):
                self._ask_after(host)
            elif isinstance(answer, BaseException):
                self._lose(host, answer)
            else:
                self._answered(host, host.calls.pop(call_number), answer)
        self._look_again()
        return self._events

    def _answered(self, host: Host, call: Call, answer: Any) -> None:
        if call.kind == "work":
            self._made(host, call, answer)
        elif call.kind == "hello":
            self._said_hello(host, answer)
        elif call.kind == "prepare":
            self._prepared(host, pickle.loads(answer) if isinstance(answer, bytes) else answer)
        elif call.kind == "are you there":
            self._cut_off(host)
        elif call.kind == "release":
            self._events.append(Released(call.logical, host.number, answer))
        if host.number in self._hosts:
            self._submit(host)
            if host.leaving and host.idle:
                self._part(host)

    def _made(self, host: Host, call: Call, landed: Landed) -> None:
        self.crashes = 0
        way_s = transit_s(host, call, landed)
        self._count_node(host, landed)
        for epoch, number, kind, value, stages, cpu_s, encode_s, nbytes in landed.results:
            service_s = self.times.count(stages, cpu_s, encode_s, nbytes)
            self.times.transit_s += way_s
            if landed.streamed:
                self.times.streamed_bytes += nbytes
            if epoch == self._epoch:
                self._suspects.discard(number)
                making = (stages[0], stages[2], stages[1], encode_s, way_s)
                end, samples = kind == END, stages[4]
                rest = (service_s, nbytes, samples, making, stages[6])
                self._events.append(Made(epoch, number, host.number, value, end, *rest))
        if landed.snapshot is not None:
            self._events.append(Snapshot(*landed.snapshot))

    def _count_node(self, host: Host, landed: Landed) -> None:
        nodes, place = self.times.nodes, host.actor.place
        nodes[place] = node_sums(landed).plus(nodes.get(place, NodeSums()))

    # -- losses --------------------------------------------------------------------------------------------------

    def _ask_after(self, host: Host) -> None:
        """Buffers will never come. If the host is dead Ray will say so, and why; else only the connection broke."""
        if not any(call.kind == "are you there" for call in host.calls.values()):
            self._submit_now(host, Call("are you there", host.actor.handle.hello.remote, []))

    def _cut_off(self, host: Host) -> None:
        self._no_stream(host, "the connection that carried them broke")
        self._lose(host, StreamBrokenError("the connection that carried its batches broke"))

    def _lose(self, host: Host, error: BaseException) -> None:
        """A call failed for Ray's reasons: whatever the host holds is lost, and the host is given up."""
        why, blameless = cause_of_death(error)
        was_up = host.stage == "up"
        lost = tuple(ticket.number for ticket in host.tickets())
        guilty = None if blameless else self._guilty(host)
        kill(host.actor.handle)
        self._forget(host)
        where = f"on node {host.actor.place} (pid {host.actor.pid})" if host.actor.pid else "that was starting"
        text = f"the Ray worker {where} died: {why}"
        if was_up:
            self.crashes += not host.leaving
            expected = host.leaving and not lost
            self._events.append(Gone(host.number, lost, guilty, expected, text, host.actor.pid))
        elif not host.leaving:
            self._start_failed(text)
        self._replace()
        if not self.counts.running and not self._closed:
            self._look_for_nodes()

    def _start_failed(self, text: str) -> None:
        self._failed_starts += 1
        self._events.append(Note(text))
        if self._failed_starts >= _FAILED_STARTS and not self.counts.running:
            self._fail(f"{self._failed_starts} workers in a row could not start; the last: {text}")

    def _guilty(self, host: Host) -> int | None:
        """The ticket a dead process was working on: known when there was just one.

        Otherwise the answers that were on their way are lost as well, so any of them may be it: next time they are
        sent one after the other.
        """
        held = [ticket.number for call in host.calls.values() for ticket in call.tickets]
        if len(held) == 1:
            return held[0]
        self._suspects.update(held)
        return None

    # -- closing -------------------------------------------------------------------------------------------------

    def close(self, grace_s: float = 5.0, *, shut_down: bool = False) -> None:
        """See `Lane.close`. Actors are parked for the next lane while anybody holds a share of the cluster.

        ``shut_down``: a private Ray ends with its last lane, instead of with the process.
        """
        if self._closed:
            return
        self._closed = True
        self._inbox.close()
        if self._owner != os.getpid():
            return
        for host in self._hosts.values():
            if host.leaving:
                kill(host.actor.handle)
            else:
                host.actor.calls = [call.ref for call in host.calls.values()]
                self._cluster.pool.park(self._pool_key, host.actor)
        self._hosts.clear()
        self._events.clear()
        self._parcel.clear()
        self.counts = LaneCounts()
        release(self._cluster, shut_down=shut_down)
