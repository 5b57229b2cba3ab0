"""Give the loaders of a script to dpex, in this process and in every Python process that it starts.

torch's ``DataLoader`` stays what it is, a class with torch's constructor, attributes and pickle, so that subclasses,
``isinstance`` and libraries that rebuild loaders see no difference. Only where it makes an iterator, dpex does
(`dpex.run.proxy_loader`, `dpex.loader.hook`). That one method is replaced as soon as torch defines the class. torch is
not imported for it, as a script may set variables that torch reads when it is imported.

Processes that the script starts read the `RunOptions` in ``DPEX_RUN``, as JSON. First on their ``PYTHONPATH`` is a
folder whose ``sitecustomize`` calls `install` and then runs the ``sitecustomize`` that comes next.
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

from dpex.loader import hook
from dpex.run.options import VARIABLE, RunOptions

TARGET = "torch.utils.data.dataloader"
ROOT = str(Path(__file__).resolve().parents[2])
_HOOK = str(Path(__file__).resolve().parent / "sitehook")


def begin(options: RunOptions, environ: MutableMapping[str, str]) -> None:
    """Take over in this process, and tell ``environ``, with which further processes will be started."""
    environ[VARIABLE] = options.to_text()
    paths = [path for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != _HOOK]
    environ["PYTHONPATH"] = os.pathsep.join([_HOOK, *paths])
    install(options)


def install(options: RunOptions) -> None:
    """Take over in this process, whether `DataLoader` was imported or not. The latest options count."""
    if ROOT not in sys.path and importlib.machinery.PathFinder.find_spec("dpex") is None:
        sys.path.append(ROOT)  # dpex was found in a folder that only the command had on its path
    module = sys.modules.get(TARGET)
    if module is not None and hasattr(module, "DataLoader"):
        _replace(module, options)
        return
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _TorchFinder)]
    sys.meta_path.insert(0, _TorchFinder(options))


class _TorchFinder:
    """Finds torch's module as Python does, and has its class changed once it is there."""

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
            loader.exec_module = functools.partial(_execute, loader.exec_module, self._options)
        return spec


def _execute(exec_module: Any, options: RunOptions, module: ModuleType) -> None:
    exec_module(module)
    _replace(module, options)


def _replace(module: ModuleType, options: RunOptions) -> None:
    hook.install(module, hook.SECOND, functools.partial(_serve, options))
    hook.observers[hook.SECOND] = functools.partial(_observe, options)


def _serve(options: RunOptions, loader: Any, torchs: hook.TorchsMethod) -> Any:
    """See `dpex.loader.hook.Server`."""
    from dpex.run.proxy_loader import iterator

    return iterator(loader, torchs, options)


def _observe(options: RunOptions, loader: Any) -> None:
    """See `dpex.loader.hook.observers`: report on the script's own loaders of dpex's class, too."""
    from dpex.run.proxy_loader import observe

    observe(loader, options)


def has_served() -> bool:
    """Return True if a loader of this process was served, without importing torch to find out."""
    closing = sys.modules.get("dpex.run.closing")
    return closing is not None and bool(closing.has_served())
