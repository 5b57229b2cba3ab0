"""Give the loaders of a script to dpex, in this process and in every Python process that it starts.

The ``DataLoader`` of torch keeps its class, constructor, attributes and pickle, so that subclasses, ``isinstance`` and
libraries that rebuild loaders see no difference. As soon as torch has defined the class, `_replace_get_iterator`
replaces only the method that makes iterators, with one that calls `dpex.run.served`. This module does not import torch,
because a script may set variables that torch reads at import.

Processes that the script starts read the `RunOptions` in ``DPEX_RUN``, as JSON. Their ``PYTHONPATH`` begins with a
folder whose ``sitecustomize`` calls `install` and then runs the next ``sitecustomize``.
"""

from __future__ import annotations

import functools
import importlib.machinery
import os
import sys
from collections.abc import MutableMapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from dpex.run.run_options import RunOptions

TARGET = "torch.utils.data.dataloader"
ROOT = str(Path(__file__).resolve().parents[2])
_HOOK = str(Path(__file__).resolve().parent / "sitehook")
_TORCHS = "_dpex_torchs"
"""Attribute of dpex's method that holds the replaced method of torch."""
VARIABLE = "DPEX_RUN"


def install_in_children(options: RunOptions, environ: MutableMapping[str, str]) -> None:
    """Take over the loaders of this process, and set ``environ`` so that new processes do the same."""
    environ[VARIABLE] = options.to_text()
    paths = [path for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != _HOOK]
    environ["PYTHONPATH"] = os.pathsep.join([_HOOK, *paths])
    install(options)


def install(options: RunOptions) -> None:
    """Take over the loaders of this process, now or when `DataLoader` is imported. The latest options apply."""
    if ROOT not in sys.path and importlib.machinery.PathFinder.find_spec("dpex") is None:
        sys.path.append(ROOT)  # only the command ``dpex`` had this folder on its path
    module = sys.modules.get(TARGET)
    if module is not None and hasattr(module, "DataLoader"):
        _replace_get_iterator(module, options)
        return
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _TorchFinder)]
    sys.meta_path.insert(0, _TorchFinder(options))


class _TorchFinder:
    """Finds torch's module as Python does. After the import of the module, the method of its class is replaced."""

    def __init__(self, options: RunOptions) -> None:
        self._options = options

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        """See `importlib.abc.MetaPathFinder`."""
        if name != TARGET:
            return None
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not self]
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            loader.exec_module = functools.partial(_execute_and_replace, loader.exec_module, self._options)
        return spec


def _execute_and_replace(exec_module: Any, options: RunOptions, module: ModuleType) -> None:
    exec_module(module)
    _replace_get_iterator(module, options)


def _replace_get_iterator(module: ModuleType, options: RunOptions) -> None:
    """Replace the method of torch's class that makes an iterator. The latest options count for new loaders."""
    loader_class: Any = module.DataLoader
    now = loader_class._get_iterator
    torchs = getattr(now, _TORCHS, now)

    @functools.wraps(torchs)
    def _get_iterator(self: Any) -> Any:
        from dpex.run.served import served_iterator

        return served_iterator(self, torchs, options)

    vars(_get_iterator).update({_TORCHS: torchs, "report": functools.partial(_report_own_loader, options)})
    loader_class._get_iterator = _get_iterator


def _report_own_loader(options: RunOptions, loader: Any) -> None:
    """Report also on a `DpexDataLoader` that the script itself made; see `dpex.loader.passes.new_iterator`."""
    from dpex.run.served import report_own_loader

    report_own_loader(loader, options)


def has_served() -> bool:
    """Return True if a loader of this process was served, without importing torch to find out."""
    served = sys.modules.get("dpex.run.served")
    return served is not None and bool(served.has_served())
