"""What others measure and the collector exports: the GPU. Values are plain; a quantity nobody can tell is None."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, kw_only=True)
class GpuReading:
    """One GPU at one moment; ratios from 0 to 1, PCIe bytes since whenever the driver began to count."""

    uuid: str
    index: str
    model: str
    kernel_active_ratio: float | None = None
    sm_active_ratio: float | None = None
    sm_occupancy_ratio: float | None = None
    dram_active_ratio: float | None = None
    memory_used_bytes: float | None = None
    memory_size_bytes: float | None = None
    pcie_rx_bytes: float | None = None
    pcie_tx_bytes: float | None = None


class GpuSource(Protocol):
    """Looks at GPUs, in a thread of its own if looking takes time."""

    def read(self) -> tuple[GpuReading, ...]:
        """The GPUs that training uses, as last seen; does not wait."""


class StallSource(Protocol):
    """Measures one loader's GPU stall by CUDA events."""

    def stall_s(self) -> float:
        """Seconds so far in which the training stream had nothing to do because of this loader; does not wait."""
