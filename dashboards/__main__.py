"""`python -m dashboards` writes dpex.json again; a test compares."""

from pathlib import Path

from dashboards.contents import DASHBOARD
from dashboards.grafana import as_text

TARGET = Path(__file__).parent / "dpex.json"

if __name__ == "__main__":
    TARGET.write_text(as_text(DASHBOARD))
