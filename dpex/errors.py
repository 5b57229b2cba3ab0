"""The errors that dpex itself raises.

Three kinds of errors keep their type. Errors of the user's dataset, sampler or collate function arrive with the
worker's traceback, as from PyTorch's DataLoader. The others are errors of PyTorch's DataLoader about its own arguments,
and of the operating system (OSError), such as "too many open files". All other errors are a `DpexError`, and also the
built-in error in brackets, which code for PyTorch may catch::

    DpexError
    ├── OptionError(ValueError)         an option of dpex, or an argument of a call, is invalid
    ├── AsyncError(RuntimeError)        an asynchronous dataset, or its wrapper, is used in an unsupported way
    ├── CacheError(RuntimeError)        a cache of samples cannot be used, or its samples are random
    ├── FixedWorkersError(ValueError)   ``resize`` asked for what ``seeding="worker"`` cannot give
    ├── WorkerDiedError(RuntimeError)   a ticket killed its worker again and again, or a stream's worker died
    ├── SampleTimeoutError(RuntimeError)  a sample took longer than ``SamplePolicy.timeout_s`` in two workers
    ├── TooManySampleErrors(RuntimeError)  more samples failed than ``SamplePolicy.max_errors`` allows
    ├── BatchTimeoutError(RuntimeError)  no batch came within ``timeout``
    ├── NoBatchError(RuntimeError)       ``batch_seed`` was called while no batch is being made
    ├── IteratorClosedError(RuntimeError)  an iterator was used after it was closed, or in a forked process
    ├── CapturedGraphError(RuntimeError)  ``next()`` would copy a batch to a device while a graph is captured there
    ├── IteratorInterruptedError(RuntimeError)  an exception interrupted an earlier ``next()`` of the iterator
    ├── ShippingError(TypeError)        the dataset, or something beside it, cannot be pickled
    ├── ClusterError(RuntimeError)      no Ray cluster could be reached or started, or Ray is not installed
    ├── StateError(ValueError)          a state of a loader cannot be read, or is of another loader
    ├── ShareError(ValueError)          trainings with the same ``share`` read different data, or cannot connect
    └── InternalError(RuntimeError)     dpex broke a rule of its own, which is a bug in dpex
"""

from __future__ import annotations


class DpexError(Exception):
    """The root of everything that dpex raises by itself.

    Examples:
        >>> from dpex import DpexDataLoader, DpexError
        >>> try:
        ...     DpexDataLoader([1, 2, 3], seeding="sometimes")
        ... except DpexError as error:
        ...     print(error)
        seeding='sometimes': give 'worker', 'batch' or None
    """


class OptionError(DpexError, ValueError):
    """An option has a value that makes no sense; the message holds the value and what is accepted."""


class AsyncError(DpexError, RuntimeError):
    """An asynchronous dataset, or a wrapper of one, is used as it cannot work; the message names it and the remedy."""


class CacheError(DpexError, RuntimeError):
    """A cache of `dpex.cached` cannot be used; the message names the folder or the random sample, and the remedy."""


class FixedWorkersError(DpexError, ValueError):
    """The number of logical workers cannot change under ``seeding="worker"``; use ``seeding="batch"``."""


class WorkerDiedError(DpexError, RuntimeError):
    """A worker ended and its work could not be made again; the message names the indices of the samples.

    It is also raised where the thread that pins memory ended.
    """


class SampleTimeoutError(DpexError, RuntimeError):
    """A sample took longer than ``SamplePolicy.timeout_s`` in two workers; the message has its index and stack."""


class TooManySampleErrors(DpexError, RuntimeError):  # noqa: N818  (what is too many, is errors)
    """More samples failed than ``SamplePolicy.max_errors`` allows; the message names the latest of them."""


class BatchTimeoutError(DpexError, RuntimeError):
    """No batch came within ``timeout`` seconds. The iterator stays usable: call ``next()`` again."""


class NoBatchError(DpexError, RuntimeError):
    """`batch_seed` was called while no batch is being made. The message names the places for calls."""


class IteratorClosedError(DpexError, RuntimeError):
    """An iterator was used after it was closed, or in a process that was forked from its owner."""


class CapturedGraphError(DpexError, RuntimeError):
    """``next()`` of a loader with a ``device`` was called while a graph was captured. The message gives a remedy."""


class IteratorInterruptedError(DpexError, RuntimeError):
    """An exception interrupted an earlier ``next()`` while it changed the state of the epoch: the iterator is broken.

    The message names that exception, and the calls that continue after the last batch that ``next()`` returned.
    """

    @classmethod
    def of(cls, why: str, *, is_counted: bool = True) -> IteratorInterruptedError:
        """Return the error for an iterator that ``why`` interrupted; ``is_counted``: a count says where it stands."""
        remedy = (
            "To continue after the last batch that next() returned, call "
            "loader.load_state_dict(loader.state_dict()), and then iter(loader)"
            if is_counted
            else "To continue, load the latest state that you saved, or begin a new epoch with iter(loader)"
        )
        return cls(
            f"an exception ({why}) interrupted next() while it changed the state of the epoch, so this iterator is "
            f"broken. {remedy}"
        )


class ShippingError(DpexError, TypeError):
    """An object cannot be pickled to travel to a worker; the message names the attribute that holds it."""


class ClusterError(DpexError, RuntimeError):
    """The Ray cluster cannot be reached or started, or Ray is not installed. The message gives cause and remedy."""


class StateError(DpexError, ValueError):
    """A state of a loader cannot be taken or read, or is of another loader; the message names what differs."""


class ShareError(DpexError, ValueError):
    """Trainings with one ``share`` do not read the same, or cannot meet; the message names both values, or why."""


class InternalError(DpexError, RuntimeError):
    """dpex broke a rule of its own. That is an error in dpex, not in what the user wrote: please report it."""
