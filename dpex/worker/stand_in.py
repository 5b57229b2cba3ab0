"""Makes the first batches of ``seeding="worker"`` in the training process, while workers are seconds away.

Batches must be those that the workers would have made, so each logical worker has here what it would have there: a copy
of the dataset, its random state, its worker info, one thread for torch's operations, and fresh modes. A batch takes the
way through the codec, as one from a worker does. All of it is put back afterwards, also after an error.

Logical workers do not move from here to a worker: not all that a dataset keeps to itself (a counter, a file) could go
along. They start anew in the worker, which makes again what was made here; see `dpex.core.assignment.Assignment.place`.
While it does so it is where it would have been without a stand-in, so waiting for it costs nothing that was not gained
before.

Whatever raises a doubt ends the standing in, and the batch in question is left to the workers (`StandInError`): an
error of the dataset, which may lie where only the workers can read it; a thread that may have drawn from the random
generators meanwhile; a dataset that cannot be copied, or whose copies would be large.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch.utils.data import get_worker_info

from dpex._torch import collate as torch_collate
from dpex._torch import set_worker_info
from dpex.errors import DpexError, InternalError
from dpex.system.other_threads import OtherThreads
from dpex.transport.arena import Arena
from dpex.transport.codec import INLINE_BYTES, Decoder, Encoder
from dpex.transport.pickling import PickledDataset, pack, unpack
from dpex.worker.collate import ArenaCollate
from dpex.worker.core import WorkerCore
from dpex.worker.in_process import one_at_a_time
from dpex.worker.modes import Modes
from dpex.worker.outcome import Failure, Stages
from dpex.worker.rng_state import ByFunctions, Generators, located
from dpex.worker.setup import WorkerSetup

MOST_COPIED_BYTES = 128 << 20
"""All copies of the dataset together. More would be felt beside the training, and would take tenths of seconds."""
FRESH_MODES = Modes(grad=True, inference=False, autocast=None, default_dtype=torch.float32)
"""Those of a process that has just started, as workers have that are not forked from the trainer."""


class StandInError(DpexError):
    """The training process cannot vouch for a batch, which is left to the workers."""


class StandIn:
    """See the module. Used by one thread.

    Args:
        setup: of the workers; it has no ``worker_init_fn`` and no stream.
    """

    def __init__(self, setup: WorkerSetup) -> None:
        self._setup = setup
        self._packed: PickledDataset | None = None
        self._core = WorkerCore(setup, cpu=time.thread_time, seed_torch=_seed_this_cpu)
        self._served: set[int] = set()
        self._collate = ArenaCollate(Arena(shared=False), INLINE_BYTES, in_worker=True)
        self._encoder = Encoder(None)
        self._decoder = Decoder(_no_slot)
        self._others = OtherThreads()

    def make(self, logical: int, number: int, index: Any, epoch: int) -> tuple[Any, Stages]:
        """The batch that logical worker ``logical`` makes of ticket ``number``, and its stage times.

        A logical worker's tickets must come in order, from its first one on.

        Raises:
            StandInError: See the module. No further ticket of any logical worker may be made here.
        """
        before = self._others.clocks()
        with one_at_a_time(), _as_in_a_worker(self._collate) as generators:
            if logical not in self._served:
                self._core.adopt(logical, None, self._copied())
                self._served.add(logical)
            self._core.resume(logical)
            begun = generators.save()
            made, stages = self._core.make(number, index, logical, epoch)
            moved = generators.moved_since(begun)
            self._core.pause()
        if isinstance(made, Failure):
            raise StandInError(made.wrapper.exc_msg.strip().rpartition("\n")[2])
        thread = self._others.ran_since(before)
        if thread is not None and moved:
            raise StandInError(f"thread {thread!r} ran meanwhile, and may have drawn random numbers")
        try:
            return self._decoder.decode(self._encoder.encode(made)), stages
        except Exception as error:
            raise StandInError(f"the batch cannot travel: {error!r}") from error

    def _copied(self) -> WorkerSetup:
        packed = self._packed
        if packed is None:
            try:
                packed = self._packed = pack(self._setup)
            except Exception as error:
                raise StandInError(f"the dataset cannot be copied: {error}") from error
        copies = len(self._served) + 1
        if packed.nbytes * copies > MOST_COPIED_BYTES:
            raise StandInError(f"{copies} copies of the dataset would take more than {MOST_COPIED_BYTES} bytes")
        copied: WorkerSetup = unpack(packed.header, [bytearray(buffer) for buffer in packed.buffers])
        return copied


@contextmanager
def _as_in_a_worker(collate: ArenaCollate) -> Iterator[Generators]:
    """Let this process be a worker's for a while; yields its generators, which are put back afterwards."""
    generators: Generators = located() or ByFunctions()
    state, threads, info = generators.save(), torch.get_num_threads(), get_worker_info()
    table = torch_collate.default_collate_fn_map
    entry = table.get(torch.Tensor)
    try:
        torch.set_num_threads(1)
        collate.install()
        with FRESH_MODES.enter():
            yield generators
    finally:
        if entry is not None:
            table[torch.Tensor] = entry
        set_worker_info(info)
        torch.set_num_threads(threads)
        generators.restore(state)


def _seed_this_cpu(seed: int) -> None:
    """As ``torch.manual_seed``, which would seed the trainer's accelerators, too."""
    torch.default_generator.manual_seed(seed)


def _no_slot(*_: int) -> NoReturn:
    raise InternalError("a batch without slots refers to one")
