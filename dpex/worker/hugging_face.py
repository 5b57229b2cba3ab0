"""The parts of a streaming dataset of Hugging Face, seen with datasets 5.2: all that reads, and the maps at its end.

A ``map`` that takes single examples and not their numbers makes one example of each. Whoever decodes has the maps, and
the dataset's own format, applied to the examples of a batch by the classes of that library themselves. A dataset whose
position was loaded from a state stays whole, as its position is one within all of its stages.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from dpex.worker.stream_parts import Split


def parts(dataset: Any) -> Split | None:
    """What reads and what decodes, or None: it is no such dataset, or has no such map at its end."""
    library = sys.modules.get("datasets.iterable_dataset")
    if library is None or type(dataset) is not library.IterableDataset:
        return None
    if dataset._starting_state_dict is not None or _is_table(dataset._formatting):
        return None
    maps: list[Any] = []
    reads = dataset._ex_iterable
    while _is_map_of_examples(reads, library):
        maps.append(reads)
        reads = reads.ex_iterable
    if not maps:
        return None
    info = dataset.info.copy()
    info.features = None
    source = library.IterableDataset(
        reads, info=info, distributed=dataset._distributed, token_per_repo_id=dataset._token_per_repo_id
    )
    source._epoch = dataset._epoch  # shared between processes: `set_epoch` reaches workers that live on
    return Split(source, _MapsOfExamples(dataset, maps, library))


class _MapsOfExamples:
    """Maps, and the dataset's format behind them, applied to given examples."""

    def __init__(self, dataset: Any, maps: list[Any], library: Any) -> None:
        self._given = given = _given_examples(library)()
        chain = given
        for stage in reversed(maps):
            chain, inner = copy.copy(stage), chain
            chain.ex_iterable = inner
        self._dataset = library.IterableDataset(
            chain,
            info=dataset.info,
            formatting=dataset._formatting,
            token_per_repo_id=dataset._token_per_repo_id,
        )

    def __call__(self, examples: Iterator[Any]) -> Iterable[Any]:
        self._given.examples = examples
        return (example for _, example in self._dataset._prepare_ex_iterable_for_iteration())


def _given_examples(library: Any) -> Any:
    class GivenExamples(library._BaseExamplesIterable):  # type: ignore[misc]
        """Yields the examples that it was given, once."""

        examples: Iterable[Any] = ()
        num_shards = 1
        sleep_on_threads_shutdown = False

        def __iter__(self) -> Iterator[tuple[int, Any]]:
            return enumerate(self.examples)

        def _init_state_dict(self) -> dict[str, Any]:
            self._state_dict = {"type": "GivenExamples"}
            return self._state_dict

    return GivenExamples


def _is_table(formatting: Any) -> bool:
    return formatting is not None and bool(formatting.is_table)


def _is_map_of_examples(stage: Any, library: Any) -> bool:
    return (
        type(stage) is library.MappedExamplesIterable
        and not stage.batched
        and not stage.with_indices
        and not inspect.iscoroutinefunction(stage.function)
        and getattr(stage, "decoding_pool", None) is None
        and not _is_table(stage.formatting)
    )
