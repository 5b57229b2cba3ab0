"""``dpex --about`` has what a report of a problem needs, and nothing that says where it ran."""

import re
import socket
import subprocess
import sys
from pathlib import Path

import torch

import dpex as package
from dpex import DpexDataLoader
from dpex.cli.about import about_text
from tests.cli.commands import ROOT, dpex

TEMPLATE = (ROOT / ".github" / "ISSUE_TEMPLATE" / "problem.md").read_text()
SECRETS = {
    "DPEX_TRACE": "/home/somebody/run.jsonl",
    "DPEX_METRICS_DIR": "/srv/metrics",
    "DPEX_METRICS_ALLOWED_HOSTS": ".corp.example",
    "DPEX_RUN_ID": "secret-project",
    "RAY_ADDRESS": "gpu-7.corp.example:6379",
    "MASTER_ADDR": "gpu-7.corp.example",
}


def test_versions_and_numbers_are_shown() -> None:
    text = about_text({"LOCAL_WORLD_SIZE": "2", "DPEX_METRICS_PORT": "9400"})
    rows = dict(re.split(r"  +", line, maxsplit=1) for line in text.splitlines())
    assert rows["dpex"] == package.__version__
    assert rows["torch"] == torch.__version__
    assert rows["Python"].startswith(".".join(map(str, sys.version_info[:2])))
    assert rows["ranks"].startswith("2 on this machine; CPUs for each: ")
    assert rows["DPEX_METRICS_PORT"] == "9400"


def test_paths_hosts_and_names_are_not_shown() -> None:
    text = about_text(SECRETS)
    assert [value for value in SECRETS.values() if value in text] == []
    assert re.findall(r"^(DPEX_\w+|RAY_ADDRESS) +set$", text, re.MULTILINE) == sorted(set(SECRETS) - {"MASTER_ADDR"})
    assert "/" not in text
    assert socket.gethostname() not in text.split()
    assert Path.home().name not in text.split()


def test_the_command_prints_it_without_importing_torch() -> None:
    done = dpex("--about")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("dpex ")
    code = "import sys; from dpex.cli.about import about_text; about_text({}); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60, check=False).returncode == 0


def test_the_issue_template_asks_for_it_and_its_block_runs() -> None:
    assert "\n    dpex --about\n" in TEMPLATE
    (block,) = re.findall(r"```python\n(.*?)```", TEMPLATE, re.DOTALL)
    with DpexDataLoader(list(range(8)), num_workers="auto") as loader:
        list(loader)
        printed: list[str] = []
        exec(block, {"loader": loader, "print": lambda *values: printed.extend(map(str, values))})
    assert printed[0].startswith("<DpexDataLoader")
    assert "()" in printed
