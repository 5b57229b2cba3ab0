# make demo | test | bench | lint: each first builds .venv when it is missing or out of date.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.dpex-installed
RAY_AGENT := $(VENV)/ray-agent
TEST_ARGS ?=
BENCH_ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help venv ray-agent demo test bench lint format clean

help:
	@echo "make demo    train a small network through DpexDataLoader, here and on a private Ray (2 minutes)"
	@echo "make test    run the tests                     (TEST_ARGS='-k name' to choose)"
	@echo "make bench   compare with PyTorch's DataLoader (BENCH_ARGS='--quick' for a first look)"
	@echo "make lint    ruff and mypy                     (make format to let ruff tidy up)"

venv: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[dev,examples]' --constraint constraints.txt
	touch $@

# Beside the environment, not in it: one test puts it on the path of the Ray that it starts.
ray-agent: $(RAY_AGENT)

$(RAY_AGENT): tests/telemetry/ray_agent.txt $(STAMP)
	rm -rf $@
	$(BIN)/python -m pip install --quiet --no-deps --target $@ --requirement $<
	touch $@

demo: $(STAMP)
	$(BIN)/python examples/demo.py

test: $(STAMP)
	$(BIN)/python -m pytest $(TEST_ARGS)

bench: $(STAMP)
	$(BIN)/python -m benchmarks $(BENCH_ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict dpex

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
