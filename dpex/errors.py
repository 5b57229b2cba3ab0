"""The errors that dpex itself raises. Each is also a subclass of the built-in error in parentheses::

    DpexError
    ├── OptionError(ValueError)          An option, or an argument of a call, is invalid or cannot change.
    ├── UsageError(RuntimeError)         A dataset or a call is used in a place or way that cannot work.
    ├── ShippingError(TypeError)         The dataset, or an object sent with it, cannot be pickled for a worker.
    ├── StateError(ValueError)           A state of a loader cannot be read, or belongs to another loader.
    ├── WorkerDiedError(RuntimeError)    A worker ended, and its work could not be made again.
    ├── SampleTimeoutError(RuntimeError)  A sample took longer than ``SamplePolicy.timeout_s``.
    ├── TooManySampleErrors(RuntimeError)  More samples failed than ``SamplePolicy.max_errors`` allows.
    ├── BatchTimeoutError(RuntimeError)  No batch came within ``timeout``; a later ``next()`` may return it.
    ├── IteratorClosedError(RuntimeError)  The iterator was closed, or belongs to the parent process.
    ├── IteratorInterruptedError(RuntimeError)  An exception interrupted ``next()``, and the iterator is broken.
    ├── ClusterError(RuntimeError)       No Ray cluster could be reached or started, or Ray is not installed.
    ├── CacheError(RuntimeError)         A cache of samples cannot be used, or a sample for it is random.
    ├── ShareError(ValueError)           Trainings with the same ``share`` read different data, or cannot connect.
    └── InternalError(RuntimeError)      dpex broke a rule of its own: please report it.

Other errors keep their type. Errors of the user's dataset, sampler or collate function arrive with the worker's
traceback, as from PyTorch's DataLoader. PyTorch's errors about its own arguments, and errors of the operating system
(OSError) such as "too many open files", are not changed either.

An error has a class of its own if a program can act on it differently than on the others. Its message names the case.
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
    """An option or an argument is invalid, or cannot change; the message has the given and the accepted values."""


class UsageError(DpexError, RuntimeError):
    """A dataset or a call is used in a place or way that cannot work; the message names the cause and the remedy.

    Examples are an asynchronous dataset that draws random numbers while it fetches, `batch_seed` called while no batch
    is being made, and ``next()`` of a loader with a ``device`` during the capture of a graph on this device.
    """


class CacheError(DpexError, RuntimeError):
    """A cache of `dpex.cached` cannot be used; the message names the folder or the random sample, and the remedy."""


class WorkerDiedError(DpexError, RuntimeError):
    """A worker ended and its work could not be made again; the message names the indices of the samples.

    It is also raised if the thread that pins memory has ended.
    """


class SampleTimeoutError(DpexError, RuntimeError):
    """A sample took longer than ``SamplePolicy.timeout_s``; the message has its index.

    It took so long in two workers, and the message has its stack, or it is a sample of an asynchronous dataset.
    """


class TooManySampleErrors(DpexError, RuntimeError):  # noqa: N818  (the plural: errors are too many)
    """More samples failed than ``SamplePolicy.max_errors`` allows; the message names the latest of them."""


class BatchTimeoutError(DpexError, RuntimeError):
    """No batch came within ``timeout`` seconds. The iterator stays usable: call ``next()`` again."""


class IteratorClosedError(DpexError, RuntimeError):
    """An iterator was used after it was closed, or in a process that was forked from its owner."""


class IteratorInterruptedError(DpexError, RuntimeError):
    """An exception interrupted an earlier ``next()`` while it changed the state of the epoch: the iterator is broken.

    The message names that exception, and the calls that continue after the last batch that ``next()`` returned.
    """

    @classmethod
    def of(cls, why: str, *, is_counted: bool = True) -> IteratorInterruptedError:
        """Return the error for an iterator that ``why`` interrupted. ``is_counted``: Whether its position is known."""
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
    """A state cannot be taken or read, or belongs to another loader; the message names the cause or the difference."""


class ShareError(DpexError, ValueError):
    """Trainings with one ``share`` read different data or cannot connect; the message has both values or the cause."""


class InternalError(DpexError, RuntimeError):
    """dpex broke a rule of its own. That is an error in dpex, not in the user's code: please report it."""
