"""Print what each module of tests cost in the last run of `make test` or `make test-long`, slowest first."""

from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

FOLDER = Path(__file__).parents[1] / ".test-times"
"""Reports of pytest (``--junitxml``), one for each command of the run. Git ignores them."""


def table() -> str:
    """Return seconds and tests of each module that took at least one second."""
    seconds, tests = Counter[str](), Counter[str]()
    for report in FOLDER.glob("*.xml"):
        for case in ElementTree.parse(report).iter("testcase"):
            module = case.attrib["classname"]
            seconds[module] += float(case.attrib["time"])  # type: ignore[assignment]
            tests[module] += case.find("skipped") is None
    rows = [(spent, tests[module], module) for module, spent in seconds.most_common() if spent >= 1]
    rest = [module for module in seconds if seconds[module] < 1]
    few = f"in {len(rest)} modules under one second each"
    rows.append((sum(seconds[module] for module in rest), sum(tests[module] for module in rest), few))
    rows.append((seconds.total(), tests.total(), "in all, added over all processes"))
    return "\n".join(f"{spent:8.1f} s {count:6.0f} tests  {name}" for spent, count, name in rows)


if __name__ == "__main__":
    print(table())
