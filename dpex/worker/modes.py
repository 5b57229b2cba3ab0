"""What torch does by the modes of the thread that asks, as it is for the batches of one iterator.

Workers inherit these modes from the thread that starts them, and batches made in the training process would have those
of the moment. So that neither decides what a batch is, the modes in which ``iter()`` was called are kept, and every
batch of ``seeding="batch"`` is made in them, wherever and whenever that is.

Not among them is what a program sets once and for all: ``torch.use_deterministic_algorithms``,
``torch.set_float32_matmul_precision``, ``torch.set_flush_denormal``. Workers have these as they were when the worker's
parent was started.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack
from typing import NamedTuple

import torch

from dpex._torch import is_any_autocast_enabled

# Asked for each batch; found once, this takes half as long.
_has_grad, _is_inference = torch.is_grad_enabled, torch.is_inference_mode_enabled
_default_dtype, _is_autocast = torch.get_default_dtype, torch.is_autocast_enabled


class Modes(NamedTuple):
    """``autocast``: on the CPU, its dtype if it is on."""

    grad: bool
    inference: bool
    autocast: torch.dtype | None
    default_dtype: torch.dtype

    def hold(self) -> bool:
        """Whether this thread has them."""
        grad, inference, autocast, default_dtype = self
        return (
            _has_grad() is grad
            and _is_inference() is inference
            and _default_dtype() is default_dtype
            and (is_any_autocast_enabled() and _is_autocast("cpu")) is (autocast is not None)
            and (autocast is None or torch.get_autocast_dtype("cpu") is autocast)
        )

    def enter(self) -> ExitStack:
        """Have them in this thread, until what is returned is closed."""
        stack = ExitStack()
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(self.default_dtype)
        stack.enter_context(torch.inference_mode(self.inference))
        stack.enter_context(torch.set_grad_enabled(self.grad))
        is_on = self.autocast is not None
        stack.enter_context(torch.autocast("cpu", dtype=self.autocast, enabled=is_on))
        return stack

    def stay(self) -> None:
        """Have them in this thread from now on."""
        _kept.modes = self.enter()  # torch leaves inference mode when nobody holds its guard any more


_kept = threading.local()


def modes_here() -> Modes:
    """Those of this thread."""
    autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
    return Modes(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast, torch.get_default_dtype())
