"""What is logged of a loader, and where it is written."""

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from dpex import DpexDataLoader, log_to, serve

DATA = TensorDataset(torch.arange(20))


class Board:
    """The method of TensorBoard's `SummaryWriter` that is used."""

    def __init__(self) -> None:
        self.kept: dict[tuple[str, int], float] = {}

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.kept[tag, step] = value


class Run:
    """The method of a W&B run that is used."""

    def __init__(self) -> None:
        self.kept: dict[tuple[str, int], float] = {}

    def log(self, values: dict[str, float], step: int) -> None:
        self.kept.update({(name, step): value for name, value in values.items()})


@pytest.mark.parametrize("kind", [Board, Run])
def test_figures_are_those_since_the_last_call(kind: Any) -> None:
    writer, loader = kind(), DpexDataLoader(DATA, num_workers=1, name="train")
    log = log_to(writer, loader)
    for step, _ in enumerate(loader, start=1):
        if step % 10 == 0:
            log(step)
    for step in (10, 20):
        assert 0 < writer.kept["dpex/train/wait_ratio", step] <= 1
        assert writer.kept["dpex/train/batches_per_s", step] > 0
        assert writer.kept["dpex/train/workers", step] == 1
    for _ in loader:
        pass
    log(21)
    assert writer.kept["dpex/train/batches_per_s", 21] > 0
    log(22)  # such as after a validation
    assert ("dpex/train/workers", 22) in writer.kept
    assert ("dpex/train/batches_per_s", 22) not in writer.kept


def test_a_logger_of_lightning_has_them_in_its_file(tmp_path: Path) -> None:
    """mlflow has the same function, `log_metrics(values, step=...)`."""
    from lightning.pytorch.loggers import CSVLogger

    writer = CSVLogger(str(tmp_path), name="run", version=0)
    loader = DpexDataLoader(DATA, num_workers=1, name="train")
    log = log_to(writer, loader)
    for _ in loader:
        pass
    log(20)
    writer.save()
    (row,) = csv.DictReader((tmp_path / "run" / "version_0" / "metrics.csv").open())
    assert (row["step"], float(row["dpex/train/workers"])) == ("20", 1.0)
    assert float(row["dpex/train/batches_per_s"]) > 0


def test_gauges_of_opentelemetry_have_the_latest_values() -> None:
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    reader = InMemoryMetricReader()
    loader = DpexDataLoader(DATA, num_workers=1, name="train")
    log = log_to(MeterProvider([reader]).get_meter("dpex"), loader)
    for _ in loader:
        pass
    log(10)
    log(20)
    read: Any = reader.get_metrics_data()
    gauges = read.resource_metrics[0].scope_metrics[0].metrics
    values = {gauge.name: gauge.data.data_points[0].value for gauge in gauges}
    assert values["dpex.train.batches_per_s"] > 0
    assert values["dpex.train.decisions"] == 0


def test_a_logger_accepts_a_served_loader() -> None:
    kept: list[str] = []
    plain = DataLoader(DATA, num_workers=1)
    serve(plain)
    log_to(lambda values, step: kept.extend(values), plain)(0)
    assert {"dpex/workers", "dpex/prefetch", "dpex/decisions"} <= set(kept)


def test_what_cannot_be_logged_is_refused() -> None:
    advice = r"no DpexDataLoader makes its batches: give a DpexDataLoader, or first call dpex\.serve\(loader\)"
    with pytest.raises(ValueError, match=advice):
        log_to(print, DataLoader(DATA))
    with pytest.raises(ValueError, match="log_to\\(3\\): give a TensorBoard SummaryWriter, a W&B run"):
        log_to(3, DpexDataLoader(DATA))
