# Each target but help, clean, test-gpu and gpu-proof first makes .venv where it is missing. `make demo` installs less.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.dpex-installed
DEMO_STAMP := $(VENV)/.demo-installed
DOCS_STAMP := $(VENV)/.docs-installed
# Other versions than the pinned ones: `make test VENV=.venv-3.13 PYTHON=python3.13 CONSTRAINTS= TORCH='torch==2.4.*' WITHOUT=ray`.
CONSTRAINTS ?= --constraint constraints.txt
TORCH ?=
WITHOUT ?=
TEST_ARGS ?=
BENCH_ARGS ?=
PYTEST ?= $(BIN)/python -m pytest
SPEED_ARGS ?=

# The benchmarks of others have an environment of their own, and so have the benchmark's rivals.
OTHERS_VENV ?= .venv-others
OTHERS_STAMP := $(OTHERS_VENV)/.others-installed

RIVALS_VENV ?= .venv-rivals
RIVALS := $(RIVALS_VENV)/bin/python
RIVALS_STAMP := $(RIVALS_VENV)/.rivals-installed

.DEFAULT_GOAL := help
.PHONY: help venv demo check check-tests check-ray test test-long test-times coverage test-gpu gpu-proof speed bench bench-readme bench-rivals bench-others bench-report docs mutants soak lint format dist clean

help:
	@echo "make demo    watch num_workers=\"auto\" at work: training, live page, diagnosis (a minute, after the installation)"
	@echo "make check   linters, types, unit tests and a few real workers: one minute, for each change"
	@echo "make test    all tests but the long ones: eight minutes on two cores  (TEST_ARGS='-k name' to choose)"
	@echo "make test-long  drills of nodes and networks, soaks and floods; a whole run is recorded in tests/long_run.json"
	@echo "make test-times  what each module of tests cost in the last run"
	@echo "make coverage  lines and branches that the default tier runs, by folder"
	@echo "make test-gpu  run the tests that need a GPU, with the Python that is there: neither Ray nor a network is needed"
	@echo "make gpu-proof  the same, then ResNet-50 with torch's loader and dpex's: all figures in under ten minutes (FIGURES)"
	@echo "make speed   train with heavy preprocessing: torch, dpex here, dpex with 1, 2 and 4 further nodes (SPEED_ARGS)"
	@echo "make bench   compare with PyTorch's DataLoader (BENCH_ARGS='--quick' for a first look, '--plan' for how long)"
	@echo "make bench-readme  measure README's table at this commit, and keep it: 25 minutes  (BENCH_ARGS=--quick)"
	@echo "make bench-rivals  the same with other loaders beside it, in an environment of their own"
	@echo "make bench-others  benchmarks of others, unchanged: DLIO (MLPerf Storage), SPDL's cases  (OTHERS_ARGS='dlio --rounds 1')"
	@echo "make bench-report  write the tables of README.md and docs from the kept results, and print their ages"
	@echo "make docs    build the documentation into site/ (python3 -m http.server --directory site shows it)"
	@echo "make mutants change dpex/schedule one expression at a time: do its tests notice?  (MUTANTS='dpex.schedule.schedule*')"
	@echo "make soak    many batches and resizes: memory, descriptors and threads must stay flat (SOAK_ARGS='--seconds 600')"
	@echo "make lint    ruff, mypy, pyright, import contracts, lengths of modules   (make format to let ruff tidy up)"
	@echo "make dist    build the sdist, and the wheel from it, in dist/"

venv: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[dev,examples]' $(if $(TORCH),'$(TORCH)') $(CONSTRAINTS)
	$(if $(WITHOUT),$(BIN)/python -m pip uninstall --quiet --yes $(WITHOUT))
	touch $@

# What the demo needs: torch and dpex, without the packages of tests and documents.
$(DEMO_STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	test -e $(STAMP) || { echo "Installing torch and dpex into $(VENV), once ($(shell date +%H:%M)) ..."; \
	    $(BIN)/python -m pip install --quiet --editable . --constraint constraints.txt; }
	touch $@

demo: $(DEMO_STAMP)
	$(BIN)/dpex demo

# Hundreds of processes import the same modules.
unexport PYTHONDONTWRITEBYTECODE

# For each change. `make test` is for each landing. Linters, tests and tests with Ray run beside each other.
check: $(STAMP)
	$(MAKE) --no-print-directory --jobs 3 --output-sync check-tests check-ray lint

check-tests: $(STAMP)
	$(PYTEST) -n 2 --dist loadfile -m "(unit or smoke) and not (long or ray)" $(TEST_ARGS)

check-ray: $(STAMP)
	$(PYTEST) -m "ray and smoke and not long" $(TEST_ARGS)

# First the tests without Ray in parallel, of which half of the time is waiting, then those with Ray, then those alone.
# Tests with Ray took 950 s beside three other processes on two cores, and 100 s by themselves.
test: $(STAMP)
	rm -rf .test-times
	$(PYTEST) --junitxml .test-times/parallel.xml -n 3 --dist loadfile --no-loadscope-reorder \
		-m "not (long or alone or ray)" $(TEST_ARGS)
	$(PYTEST) --junitxml .test-times/ray.xml -m "ray and not (long or alone)" $(TEST_ARGS)
	$(PYTEST) --junitxml .test-times/alone.xml -m "alone and not long" $(TEST_ARGS)

# Drills, soaks and floods. A whole run that passes writes tests/long_run.json.
test-long: $(STAMP)
	rm -rf .test-times
	$(PYTEST) --junitxml .test-times/long.xml -m long $(TEST_ARGS)

test-times: $(STAMP)
	$(BIN)/python tests/times.py

# With PYTHON itself, which has torch for this GPU, NumPy and pytest: nothing is installed. Figures are printed (-rP).
test-gpu:
	$(PYTHON) -m pytest -o addopts= -rP tests/gpu $(TEST_ARGS)

# All that is to be shown on a GPU, in under ten minutes: the tests, then ResNet-50 with torch's loader and with dpex's.
# The figures are in FIGURES, also those of tests that fail.
FIGURES ?= benchmarks/results
RESNET := limit:0 torch:8 torch:16 dpex:auto
gpu-proof:
	DPEX_GPU_FIGURES=$(FIGURES)/local-gpu-tests.json timeout 330 $(PYTHON) -m pytest -o addopts= -rP tests/gpu; tests=$$?; \
	rm -f $(FIGURES)/local-gpu-speed.jsonl; timeout 250 $(PYTHON) -m benchmarks --rows train-jpeg \
		--learning-window-s 12 --rounds 2 --only $(RESNET) --results $(FIGURES)/local-gpu-speed.jsonl && exit $$tests

# Lines and branches of dpex that the default tier runs, in every process. Tests that compare stderr may fail here.
COVERED := schedule engine pools transport worker autotune
coverage: $(STAMP)
	rm -rf .coverage
	-$(MAKE) test PYTEST="$(BIN)/python -m coverage run -m pytest"
	$(BIN)/python -m coverage combine --quiet
	for folder in $(COVERED); do echo $$folder; $(BIN)/python -m coverage report --include="dpex/$$folder/*" | grep TOTAL; done
	$(BIN)/python -m coverage report | grep TOTAL

speed: $(STAMP)
	$(BIN)/python -m benchmarks --rows train-jpeg train-waits --rounds 3 $(SPEED_ARGS)

bench: $(STAMP)
	$(BIN)/python -m benchmarks $(BENCH_ARGS)

bench-readme: $(STAMP)
	$(BIN)/python -m benchmarks.readme $(BENCH_ARGS)

$(RIVALS_STAMP): benchmarks/rivals/requirements.txt
	test -x $(RIVALS) || $(PYTHON) -m venv $(RIVALS_VENV)
	$(RIVALS) -m pip install --quiet --requirement $< || grep -v '^#' $< | cut -d' ' -f1 | while read -r one; do \
		$(RIVALS) -m pip install --quiet "$$one" || echo "$$one cannot be installed here: what needs it is left out"; done
	touch $@

bench-rivals: $(STAMP) $(RIVALS_STAMP)
	$(BIN)/python -m benchmarks --rivals $(RIVALS) $(BENCH_ARGS)

# OTHERS_ARGS: a module of benchmarks/others and its arguments.
OTHERS_ARGS ?= dlio

$(OTHERS_STAMP): benchmarks/others/requirements.txt
	test -x $(OTHERS_VENV)/bin/python || $(PYTHON) -m venv $(OTHERS_VENV)
	$(OTHERS_VENV)/bin/python -m pip install --quiet --requirement $<
	$(OTHERS_VENV)/bin/python -m pip install --quiet --no-deps dlio-benchmark==2.0.0 --editable .
	touch $@

bench-others: $(OTHERS_STAMP)
	$(OTHERS_VENV)/bin/python -m benchmarks.others.$(OTHERS_ARGS)

bench-report: $(STAMP)
	$(BIN)/python -m benchmarks.report

$(DOCS_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --editable '.[docs]' --constraint constraints.txt
	touch $@

docs: $(DOCS_STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

# Which changes of dpex/schedule its unit tests notice; [tool.mutmut] says which files and tests. A run that was ended goes on.
MUTANTS ?=
mutants: $(STAMP)
	$(BIN)/mutmut run $(foreach one,$(MUTANTS),'$(one)')
	$(BIN)/mutmut results | grep --invert-match 'not checked' || echo "no mutant survives"

soak: $(STAMP)
	$(BIN)/python -m benchmarks.soak $(SOAK_ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict dpex benchmarks/simulation tests/fresh_scripts/typed_use.py
	sh -c 'PATH=$(BIN):$$PATH; pyright tests/fresh_scripts/typed_use.py && pyright --verifytypes dpex --ignoreexternal'
	$(BIN)/lint-imports --no-logo
	$(BIN)/python tests/structure.py

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Without isolation: the backend is the one that constraints.txt pins, and no network is needed.
dist: $(STAMP)
	rm -rf $@
	$(BIN)/python -m build --no-isolation --outdir $@

clean:
	rm -rf $(VENV) $(RIVALS_VENV) benchmarks/data mutants build dist site .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
