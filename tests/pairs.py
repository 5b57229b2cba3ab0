"""Both ends of the codec in one process, and batches to try it with."""

import marshal
from collections import namedtuple
from typing import Any

from dpex.transport.arena import Arena, Segment, SegmentSpec, open_segment
from dpex.transport.codec import INLINE_BYTES, Encoder, decode

LARGE = 3 * INLINE_BYTES
Point = namedtuple("Point", "x y")


class Pair:
    """A worker's encoder and the trainer's decoder, with a message between them as it travels."""

    def __init__(self) -> None:
        self.segments: dict[int, Segment] = {}
        self.arena = Arena(self._announce)
        self.encoder = Encoder(self.arena)

    def _announce(self, spec: SegmentSpec, fd: int) -> None:
        self.segments[spec.segment] = open_segment(spec, fd)

    def __call__(self, batch: Any) -> Any:
        return self.decode(self.encoder.encode(batch))

    def decode(self, node: Any) -> Any:
        return decode(marshal.loads(marshal.dumps(node)), self._lease)

    def _lease(self, segment: int, slot: int, nbytes: int) -> Any:
        return self.segments[segment].view(slot, nbytes)

    def slots_held(self) -> int:
        return sum(any(s.flags[2 * n : 2 * n + 2]) for s in self.segments.values() for n in range(s.spec.slots))
