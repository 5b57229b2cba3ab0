"""The names of tests, which reports of a run and the tables of docs/ show in one line, and of classes."""

import re
from collections import Counter
from pathlib import Path

TESTS = Path(__file__).parents[1]
MOST_LETTERS = 60


def test_the_name_of_a_test_has_at_most_60_letters() -> None:
    texts = {path.name: path.read_text() for path in TESTS.rglob("*.py")}
    found = [(module, name) for module, text in texts.items() for name in re.findall(r"^ *def (test_\w+)", text, re.M)]
    assert len(found) > 1000
    assert [(module, name) for module, name in found if len(name) > MOST_LETTERS] == []


def test_no_two_classes_of_dpex_have_one_name() -> None:
    texts = [path.read_text() for path in (TESTS.parent / "dpex").rglob("*.py")]
    counts = Counter(name for text in texts for name in re.findall(r"^ *class _?(\w+)", text, re.M))
    assert len(counts) > 300
    assert [name for name, count in counts.items() if count > 1] == []
