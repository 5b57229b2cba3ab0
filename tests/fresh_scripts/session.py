"""A script of a user who has the wheel and no Ray; prints what it saw as JSON."""

import json
import os
import subprocess
import sys
import urllib.request

import torch
from squares import Squares
from torch.utils.data import DataLoader

import dpex
from dpex import DpexDataLoader, DpexError


def passed(kind, **options):
    torch.manual_seed(3)
    loader = kind(Squares(), batch_size=4, shuffle=True, **options)
    batches = list(loader)
    return {
        "batches": [batch[:, :2].tolist() for batch in batches],
        "by_workers": os.getpid() not in {pid for batch in batches for pid in batch[:, 2].tolist()},
        "diagnosis": str(loader.diagnose()) if kind is DpexDataLoader else "",
    }


def error_of(action):
    try:
        action()
    except DpexError as error:
        return f"{type(error).__name__}: {error}"


def observed():
    from dpex.telemetry.exporter import exporter

    with DpexDataLoader(Squares(), batch_size=4, num_workers=2, metrics_port=0) as loader:
        list(loader)
        with urllib.request.urlopen(f"http://localhost:{exporter.port}/metrics", timeout=60) as answer:
            scraped = answer.read().decode()
        command = [sys.executable, "-m", "dpex", "top", "--once"]
        top = subprocess.run(command, capture_output=True, text=True, timeout=60)
        return {"scraped": scraped, "top": top.stdout, "top_status": top.returncode}


def on_cluster():
    DpexDataLoader(Squares(), num_workers=2, distribute_mode=True)


def moved():
    loader = DpexDataLoader(Squares(), num_workers=2, seeding="batch")
    loader.resize(remote=2)
    list(loader)


if __name__ == "__main__":
    found = {
        "file": dpex.__file__,
        "torch": passed(DataLoader, num_workers=2),
        "fixed": passed(DpexDataLoader, num_workers=2),
        "if_connected": passed(DpexDataLoader, num_workers=2, distribute_mode="auto"),
        "tuned": passed(DpexDataLoader, num_workers="auto"),
        "observed": observed(),
        "on_cluster": error_of(on_cluster),
        "moved": error_of(moved),
    }
    found["modules"] = sorted(sys.modules)
    print(json.dumps(found))
