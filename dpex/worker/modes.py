"""Modes of a thread that torch's results depend on: gradients, inference, autocast, default dtype.

Workers inherit these modes from the thread that starts them, and batches made in the training process would have those
of the moment. So that a batch depends on neither, the modes in which ``iter()`` was called are kept, and every batch of
``seeding="batch"`` is made in them, in any process and at any time.

Settings that a program makes permanently are left out: ``torch.use_deterministic_algorithms``,
``torch.set_float32_matmul_precision``, ``torch.set_flush_denormal``. Workers have these as they were when the worker's
parent was started.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack
from typing import NamedTuple

import torch

from dpex._torch import is_any_autocast_enabled

# Called for each batch; without a look-up of the attribute this takes half as long.
_has_grad, _is_inference = torch.is_grad_enabled, torch.is_inference_mode_enabled
_default_dtype, _is_autocast = torch.get_default_dtype, torch.is_autocast_enabled


class Modes(NamedTuple):
    """The modes of a thread. ``autocast`` is its dtype on the CPU, or None if it is off."""

    grad: bool
    inference: bool
    autocast: torch.dtype | None
    default_dtype: torch.dtype

    def hold(self) -> bool:
        """Return True if this thread has these modes."""
        grad, inference, autocast, default_dtype = self
        return (
            _has_grad() is grad
            and _is_inference() is inference
            and _default_dtype() is default_dtype
            and (is_any_autocast_enabled() and _is_autocast("cpu")) is (autocast is not None)
            and (autocast is None or torch.get_autocast_dtype("cpu") is autocast)
        )

    def enter(self) -> ExitStack:
        """Set these modes in this thread, until the returned stack is closed."""
        stack = ExitStack()
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(self.default_dtype)
        stack.enter_context(torch.inference_mode(self.inference))
        stack.enter_context(torch.set_grad_enabled(self.grad))
        is_on = self.autocast is not None
        stack.enter_context(torch.autocast("cpu", dtype=self.autocast, enabled=is_on))
        return stack

    def stay(self) -> None:
        """Set these modes in this thread, without an end."""
        _kept.modes = self.enter()  # torch leaves inference mode when the last reference to its guard goes


_kept = threading.local()


def modes_here() -> Modes:
    """Return the modes of this thread."""
    autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
    return Modes(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast, torch.get_default_dtype())
