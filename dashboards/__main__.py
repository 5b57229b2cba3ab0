"""`python -m dashboards` writes dpex.json again; a test compares."""

from pathlib import Path

from dashboards.contents import dashboard

TARGET = Path(__file__).parent / "dpex.json"

if __name__ == "__main__":
    TARGET.write_text(dashboard())
