"""What a user's mypy is given: one type to reveal, one error to find."""

from dpex import AutotuneConfig, DpexDataLoader

loader: DpexDataLoader[int] = DpexDataLoader([1, 2], num_workers="auto", autotune=AutotuneConfig(max_local=2))
reveal_type(loader.resize)  # noqa: F821  (known to mypy)
DpexDataLoader([1, 2], seeding="by accident")
