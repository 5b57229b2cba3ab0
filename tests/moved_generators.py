"""Have the global generators of Python, NumPy or torch moved?"""

from __future__ import annotations

import pickle
import random
from typing import Any

import numpy as np
import torch


def fingerprints() -> dict[str, Any]:
    """Return values by name that are unequal (``!=``) once a global generator has moved."""
    return {
        "python": hash(random.getstate()),
        "numpy": pickle.dumps(np.random.get_bit_generator().state),  # type: ignore[attr-defined]
        "torch": torch.default_generator.get_state().numpy().tobytes(),
    }
