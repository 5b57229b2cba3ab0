"""Python runs this module at the start of each process under ``dpex run`` or ``dpex diagnose``; see `dpex.run.install`.
At its end, the module imports the next ``sitecustomize``."""

import importlib
import json
import os
import sys


def _leave_path() -> None:
    here = os.path.realpath(os.path.dirname(__file__))  # noqa: PTH120
    sys.path[:] = [entry for entry in sys.path if not entry or os.path.realpath(entry) != here]


def _run_next() -> None:
    own = sys.modules.pop("sitecustomize")
    try:
        importlib.import_module("sitecustomize")
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        sys.modules.setdefault("sitecustomize", own)


def _take_over() -> None:
    text = os.environ.get("DPEX_RUN")
    options = json.loads(text) if text else {}
    if options.get("prefix") != sys.prefix:
        return  # another Python, with packages of its own
    sys.path.append(options["root"])
    try:
        takeover = importlib.import_module("dpex.run.install")
    finally:
        sys.path.pop()
    takeover.install(takeover.RunOptions.from_text(text))


_leave_path()
try:
    _take_over()
finally:
    _run_next()
