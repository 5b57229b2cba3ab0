"""The version of dpex, which pyproject.toml repeats."""

VERSION = "0.1.0"
