"""The documents and the docstrings: their examples run, their links lead somewhere, and their lists are complete.

Every block of Python in README.md and docs/ runs, those of a page in their order and with shared names. A block with
`if __name__ == "__main__":` is a program, which runs in a process of its own. Two comments may stand on the line before
a block:

    <!-- example: needs a Ray cluster -->     the block is not run; `NOT_RUN` has each of these blocks, and why
    <!-- example setup: dataset = [1, 2] -->  a statement that is run before the block, so that a page can be short
"""

import ast
import contextlib
import doctest
import importlib
import inspect
import io
import logging
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from torch.utils.data import dataloader as torch_dataloader

import dpex
from dpex.dataloader import DpexDataLoader

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
LINKED = (
    *PAGES,
    ROOT / "ARCHITECTURE.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "benchmarks" / "README.md",
    ROOT / "dashboards" / "README.md",
)
NOT_RUN = {
    ("docs/how-to/feed-the-gpu.md", "needs a GPU with nvImageCodec"): 1,
    ("docs/how-to/lightning.md", "needs Lightning"): 1,
    ("docs/how-to/lightning.md", "needs Ray Train"): 1,
    ("docs/how-to/lightning.md", "needs transformers"): 1,
    ("docs/how-to/ray-cluster.md", "needs a Ray cluster"): 1,
}
"""How many blocks are not run, by page and reason. A block that could run must not be here."""
NEEDS_RAY = {"docs/how-to/ray-cluster.md"}
MARKS = {
    **dict.fromkeys(NEEDS_RAY, pytest.mark.ray),
    "docs/tutorial.md": pytest.mark.alone,  # it names the cause of a wait, which is another one on a busy machine
}
BLOCK = re.compile(
    r"(?:^<!-- example(?P<setup> setup)?: (?P<note>[^\n]+) -->\n)?^```python\n(?P<code>.*?)^```$"
    r"(?:\n\n```text\n(?P<shown>.*?)^```$)?",
    re.MULTILINE | re.DOTALL,
)
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """Python on a page, padded to the page's line numbers. not_run: why, or "". shown: its output there."""

    code: str
    setup: str
    not_run: str
    shown: str


def blocks(path: Path) -> list[Block]:
    text = path.read_text()
    return [
        Block(
            code="\n" * text.count("\n", 0, found.start("code")) + found["code"],
            setup=found["note"] if found["setup"] else "",
            not_run="" if found["setup"] else found["note"] or "",
            shown=found["shown"] or "",
        )
        for found in BLOCK.finditer(text)
    ]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def with_examples() -> list[Any]:
    """A test for each page with something to run."""
    found = [path for path in PAGES if any(not block.not_run for block in blocks(path))]
    return [pytest.param(path, id=name_of(path), marks=MARKS.get(name_of(path), ())) for path in found]


@pytest.fixture
def tidy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The names of a page. Loaders are closed afterwards, and the levels of loggers are as they were."""
    monkeypatch.setenv("DPEX_METRICS_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    loggers = [logging.getLogger(), logging.getLogger("dpex")]
    before = [logger.level for logger in loggers]
    names: dict[str, Any] = {"__name__": "documents"}
    yield names
    for loader in [value for value in names.values() if isinstance(value, DpexDataLoader)]:
        loader.close()
    for logger, level in zip(loggers, before, strict=True):
        logger.setLevel(level)


@pytest.fixture
def ray_where_needed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Connect to Ray for the blocks of a page. The Ray of the tests stands for the private one that a page starts."""
    if name_of(request.getfixturevalue("path")) in NEEDS_RAY:
        request.getfixturevalue("shared_ray")
        monkeypatch.setattr("dpex.pools.ray.cluster.has_started_ray", lambda: True)


@pytest.mark.parametrize("path", with_examples())
def test_the_examples_of_a_page_run(path: Path, tidy: dict[str, Any], ray_where_needed: None) -> None:
    for block in blocks(path):
        if 'if __name__ == "__main__":' in block.code:
            Path("program.py").write_text(block.code)
            subprocess.run([sys.executable, "program.py"], check=True, timeout=120)
        elif not block.not_run:
            out = io.StringIO()
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
                exec(block.setup, tidy)
                exec(compile(block.code, str(path), "exec"), tidy)
            shown, written = clauses(block.shown), set(clauses(out.getvalue()))
            assert sum(each in written for each in shown) >= LEAST_WRITTEN * len(shown), (shown, written)


LEAST_WRITTEN = 2 / 3
"""The least share of the clauses on a page that a run writes: causes and remedies depend on the machine."""


def clauses(text: str) -> list[str]:
    """Return the parts of sentences, with numbers and units of time masked."""
    masked = re.sub(r"(\d[\d,.]*\d|\d)( (µs|ms|s)\b)?", "#", " ".join(text.split()))
    return [each.strip() for each in re.split(r"[.:;,](?: |$)", masked) if each.strip()]


def test_stale_output_is_found() -> None:
    stale = "From 2 local workers to 6, because 64 % of the time is lost to loading. Expected: 75.8 batches/s."
    written = "From 2 local workers to 12, because the loop waits for 7 ms. Expected: 132 batches/s with a wait of 9 %."
    assert clauses("It took 1.5 ms.") == clauses("It took 20 s.") == ["It took #"]
    assert sum(each in clauses(written) for each in clauses(stale)) < LEAST_WRITTEN * len(clauses(stale))


def test_every_block_of_python_is_found() -> None:
    """A block within a list, or one that begins in another way, would pass unseen."""
    for path in PAGES:
        assert len(blocks(path)) == len(re.findall(r"```\s*py", path.read_text())), path


def test_what_does_not_run_is_named_counted_and_compiles() -> None:
    found = Counter((name_of(path), block.not_run) for path in PAGES for block in blocks(path) if block.not_run)
    assert found == NOT_RUN
    for path in PAGES:
        for block in blocks(path):
            compile(block.code, str(path), "exec")


REFERENCE = ROOT / "docs" / "reference" / "python.md"


def documented() -> dict[str, Any]:
    """What the reference shows, by the names there."""
    names = re.findall(r"^::: (\S+)$", REFERENCE.read_text(), re.MULTILINE)
    return {name: getattr(importlib.import_module(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in names}


def documented_modules() -> list[str]:
    return sorted({"dpex", *(value.__module__ for value in documented().values())})


def examples_of(module: str) -> list[doctest.DocTest]:
    finder = doctest.DocTestFinder(exclude_empty=True)
    return [test for test in finder.find(importlib.import_module(module)) if test.examples]


@pytest.mark.parametrize("module", [module for module in documented_modules() if examples_of(module)])
def test_the_examples_of_docstrings_run(module: str, tidy: dict[str, Any]) -> None:
    for test in examples_of(module):
        runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
        test.globs = tidy
        told: list[str] = []
        assert runner.run(test, out=told.append, clear_globs=False).failed == 0, "".join(told)


def anchors(path: Path) -> set[str]:
    """Of the headings, as GitHub and MkDocs name them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", path.read_text()), re.MULTILINE)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


@pytest.mark.parametrize("path", LINKED, ids=name_of)
def test_links_within_the_repository_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", path.read_text())):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        there = (path.parent / file).resolve() if file else path
        assert there.exists(), target
        assert not anchor or anchor in anchors(there), target


def test_the_reference_lists_public_names_stable_or_provisional() -> None:
    sections = re.split(r"^## ", REFERENCE.read_text(), flags=re.MULTILINE)
    stable, provisional = [], []
    for section in sections:
        names = provisional if section.partition("\n")[0].endswith(" (provisional)") else stable
        names += re.findall(r"^::: dpex\.(\w+)$", section, re.MULTILINE)
    assert sorted(stable + provisional) == sorted(dpex.__all__)
    assert 20 <= len(stable) <= 25
    promised = (ROOT / "docs" / "stability.md").read_text().partition("## Stable names")[2].partition("## ")[0]
    assert sorted(re.findall(r"`(\w+)`", promised)) == sorted(stable)
    assert [name for name, value in documented().items() if not inspect.getdoc(value)] == []


def test_the_reference_has_every_variable_of_dpex() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "dpex").rglob("*.py"))
    text = (ROOT / "docs" / "reference" / "commands.md").read_text()
    assert set(re.findall(r"\bDPEX_[A-Z_]+\b", sources)) == set(re.findall(r"^\| `(DPEX_[A-Z_]+)`", text, re.MULTILINE))


def texts_in(*paths: Path) -> str:
    """Every string in these modules. A formatted value is a zero byte."""
    nodes = [node for path in paths for node in ast.walk(ast.parse(path.read_text()))]
    formatted = [
        "".join(str(part.value) if isinstance(part, ast.Constant) else "\0" for part in node.values)
        for node in nodes
        if isinstance(node, ast.JoinedStr)
    ]
    return "\n".join([*formatted, *(str(node.value) for node in nodes if isinstance(node, ast.Constant))])


def test_the_listed_warnings_and_errors_exist() -> None:
    """dpex's code has the parts of each warning between "...", or torch's code if the row says so."""
    page = (ROOT / "docs" / "how-to" / "troubleshooting.md").read_text()
    errors, warnings = (
        re.findall(
            r"^\| (?!error|warning|---)(.+?) \| (.+) \|$",
            page.partition(f"## {title}\n")[2].partition("\n## ")[0],
            re.M,
        )
        for title in ("Errors", "Warnings")
    )
    assert {name.strip("`") for name, _ in errors} <= set(dpex.__all__)
    ours, torchs = texts_in(*(ROOT / "dpex").rglob("*.py")), texts_in(Path(torch_dataloader.__file__))
    for text, meaning in warnings:
        known = torchs if meaning.startswith("PyTorch's own warning") else ours
        assert [part for part in map(str.strip, text.split("...")) if part not in known] == [], text
    assert len(errors) > 5
    assert len(warnings) > 5


def test_pages_name_arguments_that_exist() -> None:
    named = [
        (path, callee, argument)
        for path in PAGES
        for callee, arguments in re.findall(r"\b([A-Za-z]\w+)\(([^()]*)\)", path.read_text())
        if callee in dpex.__all__
        for argument in re.findall(r"(?:^|, *)(\w+)=", arguments)
    ]
    assert len(named) > 50
    known = {callee: inspect.signature(getattr(dpex, callee)).parameters for _, callee, _ in named}
    assert [one for one in named if one[2] not in known[one[1]]] == []


def cases_of(path: str) -> set[str]:
    """Tests of a module, and test cases that are classes under another name."""
    body = ast.parse((ROOT / "tests" / path).read_text()).body
    cases = {
        node.targets[0].id for node in body if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    return cases | {node.name for node in body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize(("page", "least"), [("drills", 60), ("frameworks", 30)])
def test_what_a_table_says_is_shown_by_tests_that_exist(page: str, least: int) -> None:
    text = (ROOT / "docs" / "reference" / f"{page}.md").read_text()
    named = re.findall(r"^\| .* \| `([\w/]+\.py)::(\w+)` \|$", text, re.MULTILINE)
    assert len(named) == text.count(".py::") > least
    assert [(path, name) for path, name in named if name not in cases_of(path)] == []


def test_the_reference_shows_the_help_of_every_command() -> None:
    text = (ROOT / "docs" / "reference" / "commands.md").read_text()
    shown = re.findall(r"^## (dpex.*)\n\n<!-- .* writes help \1 -->\n\n```text\nusage: \1 ", text, re.MULTILINE)
    listed = text.partition("commands:\n  COMMAND\n")[2].partition("```")[0]
    assert shown == ["dpex", *(f"dpex {name}" for name in re.findall(r"^    (\w+) ", listed, re.MULTILINE))]
    assert len(shown) > 5


def module_paths() -> set[str]:
    """Of the package's modules, as ARCHITECTURE.md writes them."""
    paths = (path.relative_to(ROOT / "dpex") for path in (ROOT / "dpex").rglob("*.py"))
    kept = (path for path in paths if path.stem not in ("__init__", "__main__", "sitecustomize"))
    return {path.with_suffix("").as_posix() for path in kept}


def test_the_map_has_every_folder_and_names_existing_modules() -> None:
    rows = re.findall(r"^\| (`.+?) \|", (ROOT / "ARCHITECTURE.md").read_text(), re.MULTILINE)
    listed = [name for row in rows for name in re.findall(r"`([\w/]+)`", row)]
    assert len(set(listed)) == len(listed)
    parents = {path.parent.relative_to(ROOT / "dpex").as_posix() for path in (ROOT / "dpex").rglob("*.py")}
    folders = {f"{parent}/" for parent in parents if parent != "."}
    assert set(listed) == folders | {name for name in module_paths() if "/" not in name}
    starts = re.findall(r"^\| (`.+?) \| .+ \| (`.+`) \|$", (ROOT / "ARCHITECTURE.md").read_text(), re.MULTILINE)
    named = {name for row in starts for name in re.findall(r"`([\w/]+)`", row[1])}
    assert len(named) > 20
    assert named <= module_paths()


def defined_in(module: str) -> set[str]:
    """Functions, classes and methods of a module, as in "Engine.next"."""
    found = set()
    for node in ast.parse((ROOT / "dpex" / f"{module}.py").read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{one.name}" for one in node.body if isinstance(one, ast.FunctionDef)}
    return found


def test_the_ways_through_the_code_name_functions_that_are_there() -> None:
    steps = re.findall(r"^\| [^`|]+ \| (`[^|]+) \| (`[^|]+) \|$", (ROOT / "ARCHITECTURE.md").read_text(), re.MULTILINE)
    assert len(steps) > 15
    for modules, functions in steps:
        known = {name: defined_in(name) for name in re.findall(r"`([\w/]+)`", modules)}
        named = set(re.findall(r"`([\w.]+)`", functions))
        assert named <= set().union(*known.values())
        assert all(named & names for names in known.values()), modules


@pytest.mark.parametrize("path", [path for path in PAGES[1:] if not path.name[:1].isdigit()], ids=name_of)
def test_page_begins_with_whom_it_is_for(path: Path) -> None:
    _, first, *_ = path.read_text().split("\n\n")
    assert re.match(r"(dpex is .* )?This (page|guide|tutorial) is for ", first.replace("\n", " "))


@pytest.mark.parametrize("path", sorted((ROOT / "docs" / "how-to").glob("*.md")), ids=name_of)
def test_guide_answers_within_five_lines(path: Path) -> None:
    title_lines = 2
    first = path.read_text().split("\n\n")[1]
    assert "`" in first, "the first paragraph names the call, the argument or the command"
    assert title_lines + len(first.splitlines()) <= 5


def test_the_site_lists_every_page_once() -> None:
    """`mkdocs build --strict` refuses a page without a place in the navigation."""
    docs = ROOT / "docs"
    listed = re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    pages = [path.relative_to(docs).as_posix() for path in docs.rglob("*.md") if not path.name[:1].isdigit()]
    assert sorted(listed) == sorted(pages)


def test_decisions_are_numbered_dated_and_listed() -> None:
    folder = ROOT / "docs" / "decisions"
    records = sorted(path for path in folder.glob("*.md") if path.name != "index.md")
    index = (folder / "index.md").read_text()
    for path in records:
        text = path.read_text()
        title = text.splitlines()[0].removeprefix("# ")
        number = int(path.name.partition("-")[0])  # the number of a record that was removed is not given again
        assert re.search(rf"^\*Decision {number}, \d{{4}}-\d\d-\d\d\.", text, re.MULTILINE), path.name
        sections = [line for line in text.splitlines() if line.startswith("## ")]
        assert sections[:3] == ["## Context", "## Decision", "## Consequences"], path.name
        assert sections[3:] in ([], ["## Measured"]), path.name
        assert text.count("\n") <= 40, path.name
        assert f"| [{number}]({path.name}) | {title} |" in index
    assert len(re.findall(r"\(\d{4}-[\w-]+\.md\)", index)) == len(records)


def test_pages_import_public_names() -> None:
    """What is not public must be imported from its module, so that it is seen to be so."""
    for path in PAGES:
        for block in blocks(path):
            for node in ast.walk(ast.parse(block.code)):
                if isinstance(node, ast.ImportFrom) and node.module == "dpex":
                    assert {alias.name for alias in node.names} <= set(dpex.__all__), path
