"""Results of a benchmark that is measured in parts: kept by part and key in a file of JSON, and shown in a page."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.machine import commit, machine
from benchmarks.process import ROOT, run_module

BLOCK = re.compile(r"(<!-- (?P<place>[a-z]+:[a-z-]+) -->\n)(?:(?!<!-- ).)*(<!-- /part -->)", re.DOTALL)


class Parts:
    """Results by part and key. Each is written as soon as it is there, so a call that was cut off can go on."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        self.found.setdefault("machine", machine())
        self.found.setdefault("commit", commit(ROOT))

    def of(self, part: str) -> dict[str, Any]:
        """Return the results of a part."""
        results: dict[str, Any] = self.found.setdefault(part, {})
        return results

    def keep(self, part: str, key: str, found: Any) -> None:
        """Keep a result, and print it."""
        self.of(part)[key] = found
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.found, indent=1) + "\n")
        print(part, key, found, sep=" | ", flush=True)

    def measure(self, part: str, key: str, module: str, argument: str, limit_s: float) -> None:
        """Run a module in a fresh process and keep what it prints as JSON, unless the key is there."""
        if key not in self.of(part):
            self.keep(part, key, json.loads(run_module(module, argument, limit_s).splitlines()[-1]))


def origin(found: Mapping[str, Any]) -> str:
    """Return the machine and the commit of the results in words."""
    about, (sha, _) = found["machine"], found["commit"]
    return f"{about['processor']}, {about['cores']} cores, {about['system']}. Commit {str(sha)[:10]}."


def rewritten(text: str, blocks: Mapping[str, str]) -> str:
    """Return a page in which each block ``<!-- name -->`` to ``<!-- /part -->`` of these names has their text."""
    return BLOCK.sub(lambda m: f"{m[1]}{blocks[m['place']]}\n{m[3]}" if m["place"] in blocks else m[0], text)


def places(text: str) -> set[str]:
    """Return the names of the blocks of a page."""
    return {match["place"] for match in BLOCK.finditer(text)}
