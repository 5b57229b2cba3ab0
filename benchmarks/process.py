"""Running a module of this package in a fresh process, with this checkout's dpex or another's."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import IO

ROOT = Path(__file__).resolve().parent.parent
IMPORT_LIMIT_S = 120.0
ERROR_CHARACTERS = 2000
"""How much of the end of a failed process's output an error quotes."""


class MeasurementError(RuntimeError):
    """A measurement's process failed or hung; the message ends with what it wrote."""


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """Where a measured process runs.

    python: the interpreter. folder: its working directory, which is the first place where it looks for modules.
    """

    python: str = sys.executable
    folder: Path = ROOT

    @property
    def environment(self) -> dict[str, str]:
        """Modules come from `folder`, then from this checkout: so do those of every process started from there."""
        path = os.pathsep.join(str(place) for place in dict.fromkeys((self.folder, ROOT)))
        return os.environ | {"PYTHONWARNINGS": "ignore", "PYTHONPATH": path}


@contextmanager
def with_dpex_of(checkout: Path) -> Iterator[Surroundings]:
    """Surroundings in which `dpex` is that of `checkout`, and `benchmarks` are these. Raises MeasurementError."""
    with TemporaryDirectory(prefix="dpex-checkout-") as folder:
        (Path(folder) / "dpex").symlink_to(checkout.resolve() / "dpex")
        surroundings = Surroundings(folder=Path(folder))
        found = Path(
            run(surroundings, "-c", "import dpex; print(dpex.__file__)", limit_s=IMPORT_LIMIT_S).strip()
        ).resolve()
        if not found.is_relative_to(checkout.resolve()):
            raise MeasurementError(f"dpex was to come from {checkout}, but came from {found}")
        yield surroundings


def run_module(module: str, argument: str, limit_s: float, surroundings: Surroundings | None = None) -> str:
    """Run a module of this package in a fresh process and return what it printed. Raises MeasurementError."""
    return run(surroundings or Surroundings(), "-m", module, argument, limit_s=limit_s)


def run(surroundings: Surroundings, *arguments: str, limit_s: float) -> str:
    """Run the interpreter with these arguments and return what it printed. Raises MeasurementError.

    It has a session of its own, of which nothing is left afterwards, and it writes to files: processes that a loader
    leaves behind would hold a pipe open.
    """
    with TemporaryFile("w+") as out, TemporaryFile("w+") as err:
        process = subprocess.Popen(
            [surroundings.python, *arguments],
            cwd=surroundings.folder,
            env=surroundings.environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired as error:
            raise MeasurementError(f"nothing after {limit_s:g} s") from error
        finally:
            _end_session(process)
        if code:
            raise MeasurementError(_written(err).strip()[-ERROR_CHARACTERS:] or f"it ended with code {code}")
        return _written(out)


def _end_session(process: subprocess.Popen[bytes]) -> None:
    """End the process and those that it left in its session."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _written(file: IO[str]) -> str:
    file.seek(0)
    return file.read()
