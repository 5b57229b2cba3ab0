"""Private names of torch and of Ray: each in one module, and present in what is installed as dpex expects them."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, StackDataset, TensorDataset, get_worker_info
from torch.utils.data import dataloader as torchs_module

from dpex import _torch

ROOT = Path(__file__).parents[1]
HOME = ROOT / "dpex" / "_torch.py"
SOURCES = sorted((ROOT / "dpex").rglob("*.py"))
SEEN = f"looked at in torch {', '.join(_torch.TORCH_SEEN)}; this is {torch.__version__}"
"""What a failure says first."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def is_private_path(path: str) -> bool:
    return any(map(is_private, path.split(".")))


def private_imports(tree: ast.AST, package: str) -> Iterator[str]:
    """Private names that are imported from ``package``, by a statement or as a string."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            paths = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            paths = [alias.name for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and " " not in node.value:
            paths = [node.value]
        else:
            continue
        yield from (path for path in paths if path.split(".")[0] == package and is_private_path(path))


def bound_to(tree: ast.AST, packages: tuple[str, ...]) -> set[str]:
    """Names that imports from these packages bind anywhere in the module."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(packages):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {
                alias.asname or alias.name.split(".")[0] for alias in node.names if alias.name.startswith(packages)
            }
    return names


def private_reads(tree: ast.AST, package: str, also: tuple[str, ...] = ()) -> Iterator[str]:
    """``name._private`` of a name that comes from ``package``, also as ``getattr(name, "_private")``, or of its entry
    in ``sys.modules``."""
    known = bound_to(tree, (package, *also))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and _leads_to(node.value, known, package):
            yield ast.unparse(node)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr"):
            owner, name = node.args[:2]
            if isinstance(name, ast.Constant) and is_private(str(name.value)) and _leads_to(owner, known, package):
                yield ast.unparse(node)


def _leads_to(node: ast.expr, known: set[str], package: str) -> bool:
    while isinstance(node, ast.Attribute):
        node = node.value
    return (isinstance(node, ast.Name) and node.id in known) or repr(package) in ast.unparse(node)


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def elsewhere(path: Path) -> list[str]:
    tree = tree_of(path)
    return [*private_imports(tree, "torch"), *private_reads(tree, "torch", ("dpex._torch",))]


# -- methods and attributes --------------------------------------------------------------------------------------------


@cache
def torchs_attributes() -> frozenset[str]:
    """Private names of torch's loader and its iterators: what their classes define, and what is set on ``self``."""
    found = {"_DataLoader__multiprocessing_context"}
    for node in ast.walk(ast.parse(inspect.getsource(torchs_module))):
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self":
            found.add(node.attr)
    return frozenset(filter(is_private, found))


DECLARED = {name for names in _torch.ATTRIBUTES.values() for name in names}


def attributes_used(tree: ast.AST) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value)
    return names


def of_torchs_classes(path: Path) -> bool:
    """Whether this module derives from torch's loader or iterators, or works on one that it is given."""
    iterators = {"BaseDataLoaderIter", "SingleProcessDataLoaderIter", "MultiProcessingDataLoaderIter", "DatasetKind"}
    known = bound_to(tree_of(path), ("torch.utils.data", "dpex._torch"))
    return not known.isdisjoint({"DataLoader", *iterators}) or path.parent.name == "dropin"


# -- the source --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [
        "from torch._utils import ExceptionWrapper",
        "from torch.utils.data.dataloader import _DatasetKind",
        "import torch.utils.data._utils.fetch",
        "import torch; torch._C.anything",
        "import torch; getattr(torch.multiprocessing, '_set_thread_name')",
        "import torch.autograd as a; a.profiler._is_profiler_enabled",
        "import sys; sys.modules['torch']._C",
        "from importlib import import_module; import_module('torch._tensor')",
        "from dpex._torch import collate; collate._secret",
    ],
)
def test_the_reader_of_private_names_sees_what_it_should(line: str) -> None:
    tree = ast.parse(line)
    assert [*private_imports(tree, "torch"), *private_reads(tree, "torch", ("dpex._torch",))]


@pytest.mark.parametrize(
    "line", ["import torch; torch.stack", "from dpex._torch import collate", "self._torch", "torch.__version__"]
)
def test_what_is_public_is_let_be(line: str) -> None:
    tree = ast.parse(line)
    assert not [*private_imports(tree, "torch"), *private_reads(tree, "torch", ("dpex._torch",))]


def test_private_names_of_torch_are_in_one_module() -> None:
    found = {str(path.relative_to(ROOT)): names for path in SOURCES if path != HOME and (names := elsewhere(path))}
    assert found == {}, f"take these from dpex/_torch.py: {found}"


def test_each_name_is_used_and_has_one_place() -> None:
    taken = {
        alias.name
        for path in SOURCES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ImportFrom) and node.module == "dpex._torch"
        for alias in node.names
    }
    assert taken == set(_torch.__all__)


def test_private_methods_and_attributes_are_declared() -> None:
    used = {path.name: attributes_used(tree_of(path)) for path in SOURCES if of_torchs_classes(path)}
    undeclared = {name: left for name, names in used.items() if (left := names & torchs_attributes() - DECLARED)}
    assert undeclared == {}, f"enter these in ATTRIBUTES of dpex/_torch.py: {undeclared}"


def test_each_declared_attribute_is_used() -> None:
    used = set().union(*(attributes_used(tree_of(path)) for path in SOURCES if path != HOME))
    assert used >= DECLARED


# -- the torch that is installed ---------------------------------------------------------------------------------------


def parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_iterators_have_what_dpex_relies_on() -> None:
    data = TensorDataset(torch.arange(4))
    loader = DataLoader(data)
    here = iter(loader)
    workers = iter(DataLoader(data, num_workers=1))
    instances = {
        DataLoader: loader,
        _torch.BaseDataLoaderIter: here,
        _torch.SingleProcessDataLoaderIter: here,
        _torch.MultiProcessingDataLoaderIter: workers,
        torch.Tensor: torch.zeros(1),
        torch.TypedStorage: torch.zeros(1).storage(),
        torch.Generator: torch.Generator(),
        torch.nn.Module: torch.nn.Identity(),
        StackDataset: StackDataset(data),
    }
    try:
        assert instances.keys() == _torch.ATTRIBUTES.keys()
        for kind, names in _torch.ATTRIBUTES.items():
            missing = {name for name in names if not hasattr(instances[kind], name)}
            assert missing == set(), f"{kind.__name__}: {SEEN}"
    finally:
        workers._shutdown_workers()


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (_torch.BaseDataLoaderIter.__init__, ["self", "loader"]),
        (_torch.BaseDataLoaderIter._next_index, ["self"]),
        (_torch.BaseDataLoaderIter._next_data, ["self"]),
        (_torch.BaseDataLoaderIter._reset, ["self", "loader", "first_iter"]),
        (_torch.MultiProcessingDataLoaderIter._get_data, ["self"]),
        (_torch.MultiProcessingDataLoaderIter._shutdown_workers, ["self"]),
        (DataLoader._get_iterator, ["self"]),
        (_torch.DatasetKind.create_fetcher, ["kind", "dataset", "auto_collation", "collate_fn", "drop_last"]),
        (_torch.MapDatasetFetcher.__init__, ["self", "dataset", "auto_collation", "collate_fn", "drop_last"]),
        (_torch.MapDatasetFetcher.fetch, ["self", "possibly_batched_index"]),
        (_torch.pinning.pin_memory, ["data", "device"]),
        (_torch.generate_numpy_seed, ["base_seed", "worker_id"]),
        (_torch.ExceptionWrapper.__init__, ["self", "exc_info", "where"]),
        (_torch.collate.collate, ["batch", "collate_fn_map"]),
        (_torch.collate.collate_tensor_fn, ["batch", "collate_fn_map"]),
        (_torch.rebuild_from_type, ["func", "new_type", "args", "state"]),
        (_torch.rebuild_sparse_tensor, ["layout", "data"]),
    ],
    ids=lambda value: getattr(value, "__qualname__", ""),
)
def test_functions_take_what_dpex_gives_them(function: Any, names: list[str]) -> None:
    assert parameters(function) == names, SEEN


def test_the_kinds_of_datasets_differ() -> None:
    assert _torch.DatasetKind.Map != _torch.DatasetKind.Iterable


def test_a_fetcher_keeps_what_dpex_replaces() -> None:
    fetcher = _torch.MapDatasetFetcher([5, 6], True, list, False)
    assert vars(fetcher).keys() >= {"dataset", "auto_collation", "collate_fn", "drop_last"}, SEEN
    assert fetcher.fetch([1, 0]) == [6, 5]


def test_an_exception_is_wrapped_as_torch_wraps_it() -> None:
    try:
        raise KeyError("lost")
    except KeyError:
        wrapped = _torch.ExceptionWrapper(where="in a test")
    assert (wrapped.exc_type, wrapped.where) == (KeyError, "in a test"), SEEN
    assert "lost" in wrapped.exc_msg
    with pytest.raises(KeyError, match="Caught KeyError in a test"):
        wrapped.reraise()


def test_worker_info_is_what_workers_are_told() -> None:
    info = _torch.WorkerInfo(id=1, num_workers=2, seed=3, dataset=[])
    _torch.set_worker_info(info)
    try:
        assert get_worker_info() is info
    finally:
        _torch.set_worker_info(None)
    assert get_worker_info() is None


def test_numpys_seed_is_four_words() -> None:
    assert len(_torch.generate_numpy_seed(11, 0)) == 4, SEEN


def test_the_table_of_collate_functions_is_there() -> None:
    collate = _torch.collate
    names = ("tensor", "numpy_array", "numpy_scalar", "float", "int", "str")
    functions = {getattr(collate, f"collate_{name}_fn") for name in names}
    assert functions == set(collate.default_collate_fn_map.values()), SEEN
    assert collate.default_collate is torch.utils.data.default_collate


def test_tensors_are_pickled_by_functions_that_dpex_knows() -> None:
    class Sub(torch.Tensor):
        pass

    assert torch.zeros(2).as_subclass(Sub).__reduce_ex__(5)[0] is _torch.rebuild_from_type, SEEN
    assert torch.eye(2).to_sparse().__reduce_ex__(5)[0] is _torch.rebuild_sparse_tensor, SEEN
    rebuild, (_, offset, shape, stride, *_) = torch.zeros(2, 3)[1:].__reduce_ex__(5)
    assert rebuild in _torch.rebuild_tensor_functions, SEEN
    assert (offset, tuple(shape), tuple(stride)) == (3, (1, 3), (3, 1))


def test_modes_of_the_thread_are_told() -> None:
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    assert (_torch.count_function_modes(), _torch.count_dispatch_modes()) == (0, 0)
    with TorchFunctionMode(), TorchDispatchMode():
        assert (_torch.count_function_modes(), _torch.count_dispatch_modes()) == (1, 1)
    assert not _torch.is_any_autocast_enabled()
    with torch.autocast("cpu", torch.bfloat16):
        assert _torch.is_any_autocast_enabled()
    assert not _torch.is_profiled()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert _torch.is_profiled()


def test_subclasses_can_be_set_aside() -> None:
    with _torch.DisableTorchFunctionSubclass():
        assert torch.zeros(1).requires_grad_().is_leaf


@pytest.mark.skipif(not hasattr(torch.multiprocessing, "_set_thread_name"), reason="this torch names no threads")
def test_a_thread_gets_its_name() -> None:
    import threading

    def told() -> None:
        _torch.set_thread_name("pt_data_pin")
        names.append(Path("/proc/thread-self/comm").read_text().strip())

    names: list[str] = []
    thread = threading.Thread(target=told)
    thread.start()
    thread.join()
    assert names == ["pt_data_pin"], SEEN


# -- Ray ---------------------------------------------------------------------------------------------------------------


def test_private_names_of_ray_are_in_one_module() -> None:
    def found_in(path: Path) -> list[str]:
        return [*private_imports(tree_of(path), "ray"), *private_reads(tree_of(path), "ray", ("dpex._ray",))]

    places = {str(path.relative_to(ROOT)): names for path in SOURCES if (names := found_in(path))}
    names = ["ray._private.", "ray._private.client_mode_hook", "ray._private.state", "ray._private.state"]
    assert places == {"dpex/_ray.py": names}


@pytest.mark.ray
def test_ray_tells_what_is_free_on_each_node() -> None:
    ray = pytest.importorskip("ray")
    from ray._private import state

    from dpex._ray import RAY_SEEN

    seen = f"looked at in Ray {', '.join(RAY_SEEN)}; this is {ray.__version__}"
    assert callable(getattr(state, "available_resources_per_node", None)), seen
    assert parameters(state.available_resources_per_node) == [], seen


@pytest.mark.ray
def test_ray_tells_what_is_being_drained_and_takes_a_node_for_a_placement_group() -> None:
    pytest.importorskip("ray")
    from ray._private import client_mode_hook, state
    from ray.util.placement_group import placement_group

    from dpex._ray import RAY_SEEN

    seen = f"looked at in Ray {', '.join(RAY_SEEN)}"
    assert callable(getattr(state.state, "get_draining_nodes", None)), seen
    assert callable(getattr(client_mode_hook, "client_mode_wrap", None)), seen
    assert {"_soft_target_node_id", "bundle_label_selector"} <= set(parameters(placement_group)), seen
