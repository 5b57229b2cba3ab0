"""Gives the loaders of a script to dpex, in this process and in every Python process that it starts.

torch's ``DataLoader`` stays what it is, a class with torch's constructor, attributes and pickle, so that subclasses,
``isinstance`` and libraries that rebuild loaders see no difference. Only where it makes an iterator, dpex does
(`dpex.run.proxy_loader`, `dpex.loader.hook`). That one method is replaced as soon as torch defines the class;
torch is not imported for it, as a script may set variables that torch reads when it is imported.

``dpex diagnose`` comes the same way, but leaves the iterators to torch and has them counted
(`dpex.run.stock.patch`).

Processes that the script starts hear of it through the environment: the options in ``DPEX_RUN``, and first on
``PYTHONPATH`` a folder whose ``sitecustomize`` comes here and then gives way to the one that would have run.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import importlib.machinery
import os
import sys
from collections.abc import MutableMapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from dpex.loader import hook
from dpex.run.options import VARIABLE, DiagnoseOptions, RunOptions

TARGET = "torch.utils.data.dataloader"
ROOT = str(Path(__file__).resolve().parents[2])
_HOOK = str(Path(__file__).resolve().parent / "sitehook")
Options = RunOptions | DiagnoseOptions


def begin(options: Options, environ: MutableMapping[str, str]) -> None:
    """Take over in this process, and let ``environ`` tell those that will be started with it."""
    environ[VARIABLE] = options.to_text()
    paths = [path for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != _HOOK]
    environ["PYTHONPATH"] = os.pathsep.join([_HOOK, *paths])
    install(options)


def install(options: Options) -> None:
    """Take over in this process; `DataLoader` may have been imported or not. The latest options count."""
    if isinstance(options, DiagnoseOptions):
        atexit.unregister(_report)
        atexit.register(_report)  # before the script's own, so that it is called after them
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

    def __init__(self, options: Options) -> None:
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


def _execute(exec_module: Any, options: Options, module: ModuleType) -> None:
    exec_module(module)
    _replace(module, options)


def _replace(module: ModuleType, options: Options) -> None:
    hook.install(module, hook.SECOND, functools.partial(_serve, options))


def _serve(options: Options, loader: Any, torchs: hook.TorchsMethod) -> Any:
    """See `dpex.loader.hook.Server`."""
    if isinstance(options, DiagnoseOptions):
        from dpex.run.stock.patch import iterator as counted

        return counted(loader, torchs, options)
    from dpex.run.proxy_loader import iterator

    return iterator(loader, torchs, options)


def has_counted() -> bool:
    """Whether a loader was counted for ``dpex diagnose`` in this process."""
    reports = sys.modules.get("dpex.run.stock.report")
    return reports is not None and reports.has_counted()


def _report() -> None:
    reports = sys.modules.get("dpex.run.stock.report")
    if reports is not None:
        reports.report_all()
