"""Measurements in processes that are forked from one which has imported, and done, nothing else.

A run has two thousand measurements, and importing torch takes as long as half of a measurement. So it is done once, in
a process that waits for requests: it has one thread beside those of OpenBLAS, which starts them anew in a child, has
made no tensor and no loader, and forks a child for each request, which ends with its session. What comes from elsewhere
keeps processes of its own: rivals, Ray, and the time to the first batch, for which the size of the process matters.
"""

import gc
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO

from benchmarks.process import ERROR_CHARACTERS, MeasurementError, Surroundings, locked

MODULE = "benchmarks.forked"
OUT, ERR = "out", "err"
LOOK_EVERY_S = 0.01
"""How soon the end of a child is seen; it is no part of a course."""


# -- the process that forks --------------------------------------------------------------------------------------------


def serve(folder: Path, requests: IO[str], answers: IO[str]) -> None:
    """Answer each line, a request of `benchmarks.measure` and its limit in seconds, with the code that the child has.

    The child's output is in the folder. None in place of a code: the limit was over.
    """
    from benchmarks import measure

    gc.collect()
    gc.freeze()  # children do not copy pages because of a collection
    for line in requests:
        asked = json.loads(line)
        pid = os.fork()
        if not pid:
            _measure(measure.main, asked["argument"], folder)
        print(json.dumps(_ended(pid, asked["limit_s"])), file=answers, flush=True)


def _measure(main: Callable[[list[str]], None], argument: str, folder: Path) -> None:
    """In the child: measure with a session and output of its own, and end without the parent's leftovers."""
    code = 1
    try:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for name, number in ((OUT, 1), (ERR, 2)):
            file = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            os.dup2(file, number)
            os.close(file)
        main([argument])
        code = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _ended(pid: int, limit_s: float) -> int | None:
    """The code of the child, which is no more afterwards, nor is its session; None where it took longer."""
    until_s = time.monotonic() + limit_s
    code: int | None = None
    while time.monotonic() < until_s:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            break
        time.sleep(LOOK_EVERY_S)
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    if code is None:
        os.waitpid(pid, 0)
    return code


# -- who asks ----------------------------------------------------------------------------------------------------------


class ForkServer:
    """That process, as seen by the run. It is started by `forking` and ends with it."""

    def __init__(self, process: "subprocess.Popen[str]", folder: Path, surroundings: Surroundings) -> None:
        self._process, self._folder, self._surroundings = process, folder, surroundings

    def run(self, argument: str, limit_s: float) -> str:
        """What `python -m benchmarks.measure ARGUMENT` would print. Raises MeasurementError."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with locked(self._surroundings.lock):
            try:
                print(json.dumps({"argument": argument, "limit_s": limit_s}), file=self._process.stdin, flush=True)
            except BrokenPipeError as error:
                raise MeasurementError("the process that forks has ended") from error
            answer = self._process.stdout.readline()
        if not answer:
            raise MeasurementError("the process that forks has ended")
        code = json.loads(answer)
        if code is None:
            raise MeasurementError(f"nothing after {limit_s:g} s")
        if code:
            raise MeasurementError(self._written(ERR).strip()[-ERROR_CHARACTERS:] or f"it ended with code {code}")
        return self._written(OUT)

    def _written(self, name: str) -> str:
        path = self._folder / name
        return path.read_text(errors="replace") if path.exists() else ""


@contextmanager
def forking(surroundings: Surroundings) -> Iterator[ForkServer]:
    """A fork server in these surroundings, which ends with the context."""
    with TemporaryDirectory(prefix="dpex-measured-") as folder:
        process = subprocess.Popen(
            [surroundings.python, "-m", MODULE, folder],
            cwd=surroundings.folder,
            env=surroundings.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            text=True,
        )
        try:
            yield ForkServer(process, Path(folder), surroundings)
        finally:
            assert process.stdin is not None
            with suppress(BrokenPipeError):
                process.stdin.close()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


if __name__ == "__main__":
    serve(Path(sys.argv[1]), sys.stdin, sys.stdout)
