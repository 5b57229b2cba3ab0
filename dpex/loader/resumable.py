"""`state_dict` and `load_state_dict`, with which a run goes on where another stopped."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any

from dpex.errors import StateError
from dpex.loader.sizing import Sizing
from dpex.system.user_warnings import warn

if TYPE_CHECKING:
    from dpex.engine.pass_state import PassState
    from dpex.loader.runtime import LoaderRuntime

VERSION = 1
"""Of the states that are written; `load_state_dict` reads this one."""


class Resumable:
    """See the module; `dpex.DpexDataLoader` is one."""

    _runtime: LoaderRuntime
    _iterator: Any
    _begun: Any = None

    def state_dict(self) -> dict[str, Any]:
        """Return where the latest pass stands, by the batches that it has delivered.

        Batches that workers have made ahead do not count: whoever loads the state gets the batches that follow, each
        once. Call it in the thread that iterates. Before the first ``iter()`` it makes the iterator that this one will
        return, as torchdata's StatefulDataLoader does. After the end of an epoch the state begins the next one.

        From the first call on, workers ask a dataset with a ``state_dict()`` for its state now and then. If that call
        comes in the middle of an epoch of a stream, a run that goes on from this state makes the stream again from its
        start, and throws away what was delivered.

        Returns:
            Dicts and lists of numbers, strings and tensors, of a few kilobytes, which `torch.save` and
            ``torch.load(weights_only=True)`` accept. What a dataset or a sampler tells of itself is in it as it is. The
            state holds no code, and is not changed later.

        Raises:
            StateError: Another thread has been in ``next()`` for a second.

        Examples:
            >>> from dpex import DpexDataLoader
            >>> loader = DpexDataLoader(range(6), batch_size=2)
            >>> for batch in loader:
            ...     state = loader.state_dict()
            ...     break
            >>> another = DpexDataLoader(range(6), batch_size=2)
            >>> another.load_state_dict(state)
            >>> [batch.tolist() for batch in another]
            [[2, 3], [4, 5]]
        """
        from dpex.loader.plain_states import plain_pass
        from dpex.loader.state_identity import identity_of

        runtime = self._runtime
        if runtime.loaded is not None:
            return copy.deepcopy(runtime.loaded)
        why_not = _why_not(self)
        if why_not:
            return {"version": VERSION, "why_not": why_not}
        runtime.ask_states()
        if runtime.last_state is None:
            self._begun = iter(self)
        found = None if runtime.last_state is None else runtime.last_state.read()
        if found is None:
            raise StateError(
                "the state of the pass could not be read: another thread has been in next() for a second; call "
                "state_dict() in the thread that iterates"
            )
        return {"version": VERSION, "of": identity_of(self, found.point), **plain_pass(found, _dataset_of(found))}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Have the next ``iter()`` go on where the state was taken.

        An iterator of this loader that runs is left behind. The number and the place of workers may be others than
        they were; under ``seeding="worker"``, and for iterable datasets, the number must be the same. Under "auto" an
        iterable dataset that was read in one stream is read in one from there on.

        Args:
            state_dict: What `state_dict` returned, maybe in another process. An empty one changes nothing.

        Raises:
            StateError: It is of another data set, order, batch size, seed or number of workers, which the message
                names, or it is no state. It is a ValueError.
        """
        from dpex.loader.plain_states import pass_of
        from dpex.loader.state_identity import check_identity

        self._iterator, self._begun = None, None
        self._runtime.loaded = self._runtime.resume = None
        if not state_dict:
            return
        _check_version(state_dict)
        if "why_not" in state_dict:
            warn(f"the state holds no position, so that the epoch begins anew: {state_dict['why_not']}")
            return
        check_identity(state_dict["of"], self)
        state = copy.deepcopy(dict(state_dict))
        try:
            resume = pass_of(state, _index_of(self))
        except Exception as error:  # of the libraries' generators, which refuse states in many ways
            raise StateError(f"the state cannot be read: {error!r}; load one that state_dict() returned") from error
        self._runtime.loaded, self._runtime.resume = state, resume
        self._runtime.ask_states()

    def __iter__(self) -> Any:
        begun, self._begun = self._begun, None
        return super().__iter__() if begun is None else begun  # type: ignore[misc]


def _why_not(loader: Any) -> str:
    """Why a loader cannot tell where it stands, if so."""
    sizing = Sizing(loader)
    if sizing.is_piped:
        return "DataPipes are PyTorch's to read"
    if sizing.is_split and not loader.in_order:
        return "with in_order=False what is decoded is delivered in another order than it was read: give in_order=True"
    return "" if sizing.why_torch is None else f"PyTorch's own iterators make the batches ({sizing.why_torch})"


def _check_version(state: Mapping[str, Any]) -> None:
    version = state.get("version")
    if version != VERSION:
        keys = ", ".join(map(repr, islice(state, 4)))
        raise StateError(
            f"the state has version {version!r} (its keys begin with {keys}), and this release of dpex reads version "
            f"{VERSION}: load a state that state_dict() of a DpexDataLoader of this release returned"
        )


def _dataset_of(state: PassState) -> Any:
    from dpex.engine.pass_state import dataset_state_of

    return state.dataset if state.fetcher is None else dataset_state_of(state.fetcher)


def _index_of(loader: Any) -> Any:
    """What a batch of a stream is asked for: torch's sampler of a stream says it without end."""
    return [None] * loader.batch_size if loader.batch_size is not None else None
