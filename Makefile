# make demo | test | bench | bench-rivals | bench-report | lint: each first builds .venv when it is missing or old.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.dpex-installed
RAY_AGENT := $(VENV)/ray-agent
TEST_ARGS ?=
BENCH_ARGS ?=

# The benchmark's rivals have an environment of their own.
RIVALS_VENV ?= .venv-rivals
RIVALS := $(RIVALS_VENV)/bin/python
RIVALS_STAMP := $(RIVALS_VENV)/.rivals-installed

.DEFAULT_GOAL := help
.PHONY: help venv ray-agent demo test bench bench-rivals bench-report lint format clean

help:
	@echo "make demo    train a small network through DpexDataLoader, here and on a private Ray (2 minutes)"
	@echo "make test    run the tests, several at a time  (TEST_ARGS='-k name' to choose)"
	@echo "make bench   compare with PyTorch's DataLoader (BENCH_ARGS='--quick' for a first look, '--plan' for how long)"
	@echo "make bench-rivals  the same with other loaders beside it, in an environment of their own"
	@echo "make bench-report  write the README's tables from the kept results"
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
	$(BIN)/python -m tests $(TEST_ARGS)

bench: $(STAMP)
	$(BIN)/python -m benchmarks $(BENCH_ARGS)

$(RIVALS_STAMP): benchmarks/rivals/requirements.txt
	test -x $(RIVALS) || $(PYTHON) -m venv $(RIVALS_VENV)
	$(RIVALS) -m pip install --quiet --requirement $< || grep -v '^#' $< | cut -d' ' -f1 | while read -r one; do \
		$(RIVALS) -m pip install --quiet "$$one" || echo "$$one cannot be installed here: what needs it is left out"; done
	touch $@

bench-rivals: $(STAMP) $(RIVALS_STAMP)
	$(BIN)/python -m benchmarks --rivals $(RIVALS) $(BENCH_ARGS)

bench-report: $(STAMP)
	$(BIN)/python -m benchmarks.report

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict dpex benchmarks/simulation

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(RIVALS_VENV) benchmarks/data build dist .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
