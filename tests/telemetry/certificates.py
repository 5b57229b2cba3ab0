"""Certificates that the tests make themselves."""

import shutil
import subprocess
from pathlib import Path

import pytest


def make_certificate(key: Path, cert: Path) -> None:
    """Write the PEM files of a certificate for localhost, or skip the test where there is no openssl."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificates and is not installed")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    files = ["-keyout", key, "-out", cert, "-addext", "subjectAltName=DNS:localhost"]
    subprocess.run([*command, *files], check=True, capture_output=True, timeout=60)
