"""``dpex run`` beside ``python``: exit codes, tracebacks, arguments, stdin, and the processes that a script starts."""

import os
import signal
import sys
from pathlib import Path

import pytest

from tests.cli.commands import ROOT, dpex, python

CASES = {
    "a status": ("import sys; print('hello'); sys.exit(3)", 3),
    "an error": ("def f():\n    raise KeyError('x')\n\ntry:\n    1 / 0\nexcept ZeroDivisionError:\n    f()\n", 1),
    "a syntax error": ("print(1)\nif\n", 1),
    "an import error": ("import there_is_no_such_module", 1),
    "Ctrl-C": ("import os, signal; os.kill(os.getpid(), signal.SIGINT); input()", -signal.SIGINT),
    "a signal": ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
    "its own hook": ("import sys\nsys.excepthook = lambda kind, value, tb: print('hook', value)\n1 / 0", 1),
    "atexit": ("import atexit\nx = 5\natexit.register(lambda: print('x is', x))", 0),
    "a broken pipe": ("raise BrokenPipeError(32, 'Broken pipe')", 1),
    "stdin": ("import sys; print(sys.stdin.read().upper())", 0),
    "its path": ("import sys; print(sys.argv, sys.path[0], __file__)", 0),
    "what it is": (
        (
            "import __main__\nprint(__name__, __spec__, __package__, __doc__, type(__loader__), sorted(globals()))\n"
            "print(type(__builtins__), __builtins__.len([1]), vars(__main__) is globals())"
        ),
        0,
    ),
}


def assert_ends_like(plain: str, ours: str) -> None:
    """The same lines but for the frames of the command, with which a traceback begins."""
    assert bool(plain) == bool(ours)
    lines = iter(ours.splitlines())
    assert all(line in lines for line in plain.splitlines())  # in their order
    assert ours.splitlines()[-1:] == plain.splitlines()[-1:]


@pytest.mark.parametrize(("source", "status"), CASES.values(), ids=CASES)
def test_a_script_ends_as_under_python(source: str, status: int, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(source)
    arguments = ("script.py", "--num-workers", "two", "--", "-m")
    plain, ours = (run(*arguments, cwd=tmp_path, input="abc") for run in (python, lambda *a, **o: dpex("run", *a, **o)))
    assert ours.returncode == plain.returncode == status
    assert ours.stdout == plain.stdout
    assert_ends_like(plain.stderr, ours.stderr)


def test_a_module_runs_as_under_python(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package/__init__.py").touch()
    (tmp_path / "package/train.py").write_text("import sys; print(__name__, __package__, sys.argv, sys.path[0]); 1 / 0")
    plain = python("-m", "package.train", "-m", "x", cwd=tmp_path)
    ours = dpex("run", "-m", "package.train", "-m", "x", cwd=tmp_path)
    assert ours.returncode == plain.returncode == 1
    assert ours.stdout == plain.stdout
    assert_ends_like(plain.stderr, ours.stderr)
    missing = dpex("run", "-m", "package.nothing", cwd=tmp_path)
    assert missing.returncode == 1
    assert missing.stderr == f"{sys.executable}: No module named package.nothing\n"


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    done = dpex("run", "nothing.py", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == "dpex run: can't open file 'nothing.py': there is none\n"
    assert "it is a folder; give a file, or -m" in dpex("run", ".", cwd=tmp_path).stderr


def test_a_wrong_option_is_refused_with_the_usage_of_the_command(tmp_path: Path) -> None:
    done = dpex("run", "--distribute-mode", "0", "train.py", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("usage: dpex run ")
    assert "dpex run: error: distribute_mode=0: give " in done.stderr


@pytest.mark.smoke
def test_torch_is_not_imported_for_it(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import sys; print({'torch', 'numpy', 'ray'} & set(sys.modules))")
    assert dpex("run", "script.py", cwd=tmp_path).stdout == "set()\n"


CHILD = "import sys; print([type(finder).__name__ for finder in sys.meta_path][0], 'other' in sys.modules)"


def test_child_processes_get_dpex_run_and_their_sitecustomize(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import other")
    (tmp_path / "other.py").touch()
    (tmp_path / "child.py").write_text(CHILD)
    (tmp_path / "script.py").write_text("import subprocess, sys; subprocess.run([sys.executable, 'child.py'])")
    path = {"PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    assert dpex("run", "script.py", cwd=tmp_path, env=path).stdout == "_TorchFinder True\n"
    assert python("script.py", cwd=tmp_path, env=path).stdout != "_Finder True\n"


def test_another_pythons_processes_are_left_alone(tmp_path: Path) -> None:
    """Its prefix differs: it may lack torch, or have another version of it."""
    source = (
        "import os, subprocess, sys\n"
        "os.environ['DPEX_RUN'] = os.environ['DPEX_RUN'].replace(sys.prefix, '/elsewhere')\n"
        f"subprocess.run([sys.executable, '-c', {CHILD!r}])"
    )
    (tmp_path / "script.py").write_text(source)
    done = dpex("run", "script.py", cwd=tmp_path)
    assert done.stdout.split()[0] not in ("", "_Finder")


WRONG = {
    "--num-workers some": "'some': give a whole number of at least 1, auto or keep",
    "--memory-budget much": "WorkerConfig(memory_budget='much'): give a positive number of bytes",
    "--distribute-mode maybe": "distribute_mode='maybe': give False (this machine), True (the Ray cluster) or 'auto'",
    "--num-workers keep --also-in-process": "--num-workers keep leaves every loader its number",
}


@pytest.mark.parametrize(("options", "message"), WRONG.items(), ids=WRONG)
def test_wrong_options_are_refused_before_the_script_runs(
    options: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from dpex.cli.main import main

    with pytest.raises(SystemExit) as ended:
        main(["run", *options.split(), "nothing.py"])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
