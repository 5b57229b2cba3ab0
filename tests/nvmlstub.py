"""A stand-in for the driver's library, compiled from `nvml_stub.c`."""

import shutil
import subprocess
from pathlib import Path

import pytest


def built_in(folder: Path) -> Path:
    """That folder, for ``LD_LIBRARY_PATH``, with the library in it."""
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    source, target = Path(__file__).with_name("nvml_stub.c"), folder / "libnvidia-ml.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", "-Wall", "-Werror", "-O1", source, "-o", target], check=True)
    return folder
