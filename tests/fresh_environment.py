"""A virtual environment that holds one wheel, and of all else only what the wheel declares to need."""

import email
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from email.message import Message
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

NEVER_LINKED = {"..", "__pycache__"}
"""First parts of recorded paths that are no module: scripts lie elsewhere, and caches are shared."""


def metadata_of(wheel: Path) -> Message:
    """Read the wheel's ``METADATA``."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name))


def declared(requirements: Iterable[str], extras: Iterable[str] = ()) -> Iterator[Requirement]:
    """Yield the requirements that hold here, with these extras."""
    for requirement in map(Requirement, requirements):
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            yield requirement


def closure(requirements: Iterable[str]) -> dict[str, metadata.Distribution]:
    """Find what these requirements need, directly or not, among what this Python has installed.

    Raises:
        metadata.PackageNotFoundError: one of them is not installed.
    """
    found: dict[str, metadata.Distribution] = {}
    waiting = list(declared(requirements))
    while waiting:
        requirement = waiting.pop()
        if requirement.name not in found:
            one = found[requirement.name] = metadata.distribution(requirement.name)
            waiting += declared(one.requires or (), requirement.extras)
    return found


@dataclass(frozen=True, kw_only=True)
class FreshEnvironment:
    """The environment lies in ``folder``; commands run in ``work``, which is empty but for what tests write."""

    folder: Path
    work: Path

    @property
    def site_packages(self) -> Path:
        """Return the folder of its modules."""
        base = str(self.folder)
        return Path(sysconfig.get_path("purelib", "posix_prefix", {"base": base, "platbase": base}))

    def run(self, *command: str, timeout_s: float = 240.0, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a command of the environment, such as ``python`` or ``dpex``, without this process's settings."""
        program, *arguments = command
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("DPEX_", "PYTHON", "RAY_"))}
        return subprocess.run(
            [str(self.folder / "bin" / program), *arguments],
            cwd=self.work,
            env=kept | {"OMP_NUM_THREADS": "1", "DPEX_METRICS_DIR": str(self.folder / "sd")},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            **options,
        )


def make(wheel: Path, folder: Path) -> FreshEnvironment:
    """Install the wheel with pip, and link what it needs to where this Python has it."""
    made = FreshEnvironment(folder=folder / "env", work=folder / "work")
    made.work.mkdir(parents=True)
    venv.create(made.folder, symlinks=True)
    for one in closure(metadata_of(wheel).get_all("Requires-Dist", ())).values():
        _link(one, made.site_packages)
    install = ["install", "--quiet", "--no-deps", "--no-index", "--disable-pip-version-check", str(wheel)]
    pip = [sys.executable, "-m", "pip", "--python", str(made.folder / "bin" / "python")]
    subprocess.run([*pip, *install], check=True, capture_output=True, text=True, timeout=240)
    return made


def _link(distribution: metadata.Distribution, site_packages: Path) -> None:
    for part in {path.parts[0] for path in distribution.files or ()} - NEVER_LINKED:
        target = Path(str(distribution.locate_file(part))).resolve()
        if not (site_packages / part).exists() and target.exists():
            (site_packages / part).symlink_to(target)
