"""Everything that dpex raises for reasons of its own is a `DpexError`, and what code written for torch catches."""

from __future__ import annotations

import ast
import builtins
import inspect
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest

from dpex import errors
from dpex.errors import DpexError

PACKAGE = Path(__file__).parents[1] / "dpex"
PUBLIC = [value for value in vars(errors).values() if inspect.isclass(value)]
BUILTIN = {name for name, value in vars(builtins).items() if inspect.isclass(value) and issubclass(value, Exception)}
PROTOCOL = {"AttributeError", "StopIteration"}
"""Python itself asks for these: of ``__getattr__`` and ``__next__``."""
ALLOWED = {
    "as torch: the same check of the same argument, or in place of an error that cannot travel": {
        ("iterators.with_workers", "AssertionError"),
        ("pools.local.worker_process", "RuntimeError"),
    },
    "as the operating system: what it refused, whether it said so or dpex saw it first": {
        ("autotune.runtime.recorder", "OSError"),
        ("pools.agent.connection", "ConnectionResetError"),
        ("pools.agent.connection", "TimeoutError"),
        ("pools.local.handles", "OSError"),
        ("pools.local.worker_process", "BrokenPipeError"),
        ("pools.local.worker_process", "OSError"),
        ("system.run_queue", "FileNotFoundError"),
        ("system.directories", "OSError"),
        ("system.directories", "PermissionError"),
        ("transport.memory_map", "OSError"),
    },
    "within dpex: whoever calls turns it into a TraceError, a warning or another way of doing it": {
        ("autotune.trace.format", "TypeError"),
        ("autotune.trace.format", "ValueError"),
        ("system.directories", "ValueError"),
        ("system.rank_board", "ValueError"),
        ("pools.agent.events", "TypeError"),
        ("worker.rng_state", "LookupError"),
    },
    "a mistake of whoever calls, which only dpex and its tests do": {
        ("system.clock", "ValueError"),
        ("transport.memory_map", "ValueError"),
    },
}
"""Where built-in errors are made, and why they are no `DpexError`."""


def trees() -> dict[str, ast.Module]:
    paths = sorted(PACKAGE.rglob("*.py"))
    return {".".join(path.relative_to(PACKAGE).with_suffix("").parts): ast.parse(path.read_text()) for path in paths}


def builtin_errors(tree: ast.Module) -> Iterator[str]:
    """Names of those that are made anywhere in a module, or raised as classes."""
    for node in ast.walk(tree):
        made = node.func if isinstance(node, ast.Call) else node.exc if isinstance(node, ast.Raise) else None
        if isinstance(made, ast.Name) and made.id in BUILTIN:
            yield made.id


def base_names(node: ast.ClassDef) -> set[str]:
    return {ast.unparse(base).rpartition(".")[2] for base in node.bases}


@pytest.mark.parametrize("error", PUBLIC)
def test_a_public_error_is_a_dpex_error_and_a_built_in_one(error: type[Exception]) -> None:
    assert issubclass(error, DpexError)
    assert inspect.getdoc(error)
    others = [base for base in error.__bases__ if base is not DpexError]
    assert [base.__name__ in BUILTIN for base in others] == [True]


@pytest.mark.parametrize("error", PUBLIC)
def test_a_public_error_travels_between_processes(error: type[Exception]) -> None:
    again = pickle.loads(pickle.dumps(error("value=3: give 4")))
    assert (type(again), str(again)) == (error, "value=3: give 4")


def test_every_class_of_errors_in_the_package_is_in_the_tree() -> None:
    """But for those with an underscore, which never leave their module."""
    classes = {node.name: base_names(node) for tree in trees().values() for node in ast.walk(tree) if is_error(node)}
    known = {"DpexError"}
    while new := {name for name, bases in classes.items() if bases & known} - known:
        known |= new
    assert {name for name in classes if not name.startswith("_")} == known
    assert len(known) > len(PUBLIC)


def is_error(node: ast.AST) -> bool:
    return isinstance(node, ast.ClassDef) and any(name.endswith(("Error", "Exception")) for name in base_names(node))


def test_built_in_errors_are_made_only_where_there_is_a_reason() -> None:
    found = {(module, name) for module, tree in trees().items() for name in builtin_errors(tree)}
    assert {(module, name) for module, name in found if name not in PROTOCOL} == set().union(*ALLOWED.values())


def test_the_reader_of_errors_sees_what_it_should() -> None:
    source = "raise ValueError('x')\nerror = OSError(2)\nraise StopIteration\nraise OptionError('x')\nraise error"
    assert sorted(builtin_errors(ast.parse(source))) == ["OSError", "StopIteration", "ValueError"]
    assert is_error(ast.parse("class OwnError(errors.DpexError, ValueError): ...").body[0])
    assert not is_error(ast.parse("class Errors(list): ...").body[0])
