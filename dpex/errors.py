"""Errors that dpex raises itself.

Errors of the user's dataset, sampler or collate function arrive as themselves, with the worker's traceback,
exactly as PyTorch's DataLoader hands them over. The tree below is for what dpex has to say::

    DpexError
    ├── OptionError(ValueError)         a constructor argument or a call to ``resize`` makes no sense
    ├── FixedWorkersError(ValueError)   ``resize`` asked for what ``seeding="worker"`` cannot give
    ├── WorkerDiedError(RuntimeError)   a ticket killed its worker again and again, or a stream's worker died
    ├── IteratorClosedError(RuntimeError)  an iterator was used after it was closed, or in a forked process
    ├── InterruptedSamplerError(RuntimeError)  a signal handler's exception ended the sampler: the epoch is not complete
    ├── ShippingError(TypeError)        the dataset, or something beside it, cannot be pickled
    └── ClusterError(RuntimeError)      no Ray cluster could be reached or started
"""

from __future__ import annotations


class DpexError(Exception):
    """Root of everything dpex raises by itself."""


class OptionError(DpexError, ValueError):
    """An option has a value that makes no sense; the message holds the value and the remedy."""


class FixedWorkersError(DpexError, ValueError):
    """Under ``seeding="worker"`` the number of logical workers cannot change; use ``seeding="batch"``."""


class WorkerDiedError(DpexError, RuntimeError):
    """A worker process or actor died and its work could not be made again; names the dataset indices."""


class IteratorClosedError(DpexError, RuntimeError):
    """An iterator was used after it was closed, or in a process that was forked from its owner; says what to do."""


class InterruptedSamplerError(DpexError, RuntimeError):
    """A signal handler's exception came out of a sampler that is a generator: the epoch ends early, and says so."""


class ShippingError(DpexError, TypeError):
    """An object cannot travel to a worker; the message names the attribute that holds it."""


class ClusterError(DpexError, RuntimeError):
    """The Ray cluster asked for is not there; the message says what was tried."""
