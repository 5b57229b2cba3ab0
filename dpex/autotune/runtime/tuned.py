"""The tuner's result for another run: values, a file of JSON, and the arguments that fix the same numbers."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dpex.autotune.config import AutotuneConfig
from dpex.autotune.runtime.trace import filled_in
from dpex.errors import OptionError
from dpex.measure.settings import WORKER_POOLS, Settings

VERSION = 1
_LEAST = {"local": 0, "remote": 0, "prefetch": 1}


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """The workers and the prefetch that a loader found. Another run starts with them: `AutotuneConfig(start=...)`.

    Attributes:
        local, remote: Workers on this machine, and on the cluster.
        prefetch: The maximum number of batches that are drawn and not yet delivered.
        seeding: The loader's ``seeding``, on which random augmentations depend.
    """

    local: int
    remote: int = 0
    prefetch: int
    seeding: str = "batch"

    def __str__(self) -> str:
        return str(self.settings)

    @property
    def settings(self) -> Settings:
        """The values as `Settings`."""
        return Settings(local=self.local, remote=self.remote, prefetch=self.prefetch)

    def as_dict(self) -> dict[str, Any]:
        """Return values for JSON, which ``AutotuneConfig(start=...)`` takes too."""
        return {"dpex_tuned": VERSION, **asdict(self)}

    def save(self, file: str | os.PathLike[str]) -> None:
        """Write a file for ``AutotuneConfig(start=file)``.

        ``{rank}`` in its name becomes the rank of this process, and ``~`` the home directory.
        """
        Path(filled_in(os.fspath(file), os.environ)).expanduser().write_text(json.dumps(self.as_dict()) + "\n")

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of a `DpexDataLoader` with these numbers of workers and the same random numbers.

        Its prefetch is the next multiple of the number of workers. With remote workers the seeding is ``"batch"``; give
        ``distribute_mode=True`` beside these arguments.
        """
        if not self.remote:
            return {**self.torch_arguments(), "seeding": self.seeding}
        fixed: dict[str, Any] = {
            f"{end}_{name}": getattr(self, name) for end in ("min", "max") for name in WORKER_POOLS
        }
        config = AutotuneConfig(start=self, max_prefetch=self.prefetch, **fixed)
        return {"num_workers": "auto", "autotune": config}

    def torch_arguments(self) -> dict[str, Any]:
        """Return the nearest arguments of PyTorch's loader, which has only local workers."""
        if not self.settings.workers:
            return {"num_workers": 0}
        factor = math.ceil(self.prefetch / self.settings.workers)
        return {"num_workers": max(1, self.local), "prefetch_factor": factor}


def start_of(config: AutotuneConfig) -> Tuned | None:
    """Return the initial settings in ``config.start``, or None if there are none.

    Raises:
        OptionError: The file is missing, is of another version, or holds something else.
    """
    given = values = config.start
    if given is None or isinstance(given, Tuned):
        return given
    try:
        if isinstance(given, (str, os.PathLike)):
            values = json.loads(Path(filled_in(os.fspath(given), os.environ)).expanduser().read_text())
        elif not isinstance(given, Mapping):
            values = given.as_dict()
        if not isinstance(values, Mapping) or values.get("dpex_tuned") != VERSION:
            raise ValueError(f"no settings of version {VERSION} ({values!s:.40})")
        counts: dict[str, Any] = {name: values.get(name) for name in _LEAST}
        for name, count in counts.items():
            if type(count) is not int or count < _LEAST[name]:
                raise ValueError(f"{name}={count!r} is not a whole number of at least {_LEAST[name]}")
    except (OSError, ValueError) as error:
        advice = "give loader.tuned, or a file that its save() wrote with this version"
        raise OptionError(f"AutotuneConfig(start={given!r}): {error}; {advice}") from error
    return Tuned(**counts, seeding=str(values.get("seeding", "batch")))
