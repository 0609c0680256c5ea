# `make demo` and `make test` need only Python 3.11 or newer and a package index. The first call creates .venv.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
unexport PYTHONHOME
# Hundreds of processes import the code, and would each compile it.
unexport PYTHONDONTWRITEBYTECODE

VENV := .venv
BIN := $(VENV)/bin
# -qq shows errors only; PIP_USER in the environment would install into the user's home
PIP := PIP_USER=0 PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install -qq
CODE := delta_tracker benchmarks examples tests
# Four workers on two cores, because half of a test's time is a wait for a process, a server or a store.
WORKERS := 4

# Not in requirements-cpu.txt, because it takes 691 MB.
TRITON := 3.7.1
# The GPU targets use the environment of python3, which needs a torch for CUDA; without a GPU, they use .venv.
DEVICE := cuda
PYTHON := $(if $(filter cuda,$(DEVICE)),python3,$(BIN)/python)
INSTALLED := $(if $(filter $(BIN)/%,$(PYTHON)),$(VENV)/.installed)

.PHONY: help demo demo-failover check test test-area test-gpu test-triton test-matrix test-no-extras test-reverts test-sweeps test-daily-sweeps test-long-sweeps dist test-dist bench bench-gpu docs lint types format clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.installed  ## train on MovieLens while a predictor follows; writes demo-output/
	@$(BIN)/python -m examples.movielens

demo-failover: $(VENV)/.installed  ## kill the trainer of the demo twice; a standby takes over; writes failover-output/
	@$(BIN)/python -W ignore -m examples.movielens.failover

check: lint types  ## before a commit, in 90 s: lint, types, and the tests of what changed since BASE, by default upstream or HEAD
	@$(BIN)/python -W ignore -m tests.check $(BASE)

test-area: $(VENV)/.installed  ## run the tests of AREA, such as predictor; without AREA, show the areas
	@$(BIN)/python -m tests.areas $(AREA)

test: $(VENV)/.installed  ## run the tests
	@$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

test-gpu: $(INSTALLED)  ## run the tests on a GPU, or everywhere with DEVICE=simulated; PYTHON is the interpreter
	@$(PYTHON) .ci/gpu test --device $(DEVICE) $(ARGS)

test-triton: $(VENV)/triton/.installed  ## run the Triton engine in its interpreter, and compile it for two GPUs
	@PYTHONPATH="$(CURDIR)/$(VENV)/triton$${PYTHONPATH:+:$$PYTHONPATH}" $(BIN)/python -m pytest -n 2 -k triton \
	    tests/contract/test_row_sets.py tests/system/test_triton_interpreter.py

test-no-extras: $(VENV)/.installed  ## run tests as if no optional package, or neither torchrec nor fbgemm were installed
	@DELTA_TRACKER_NO_EXTRAS=1 $(BIN)/python -m pytest -n 2 tests/monitor tests/system/test_monitor_*.py
	@PYTHONPATH="$(CURDIR)/tests/without_torchrec$${PYTHONPATH:+:$$PYTHONPATH}" $(BIN)/python -m pytest -n 2 \
	    -k "not beside" tests/sharding/test_plain_tables.py tests/sharding/test_plain_promises.py tests/predictor/test_predictor.py \
	    delta_tracker/tracker/checkpoint/rank_counters.py

test-reverts: $(VENV)/.installed  ## bring faults back in a copy and check that they are found; ARGS selects by word
	@$(BIN)/python -W ignore -m tests.reverts $(ARGS)

# Files whose tests are marked as sweeps, see tests/sweeps.py.
SWEEPS = $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $$(grep -rlE 'mark\.sweep\(' tests --include='test_*.py')

test-sweeps: $(VENV)/.installed  ## run the sweeps completely that take up to half a minute each
	@DELTA_TRACKER_WHOLE_SWEEPS=short $(SWEEPS)

test-daily-sweeps: $(VENV)/.installed  ## run a tenth of these, another one each day, as CI does
	@DELTA_TRACKER_WHOLE_SWEEPS=daily $(SWEEPS)

test-long-sweeps: $(VENV)/.installed  ## run the other sweeps completely, in some half an hour
	@DELTA_TRACKER_WHOLE_SWEEPS=long $(SWEEPS)

test-matrix: $(VENV)/.installed  ## run the tests against every supported torchrec and Python; ARGS goes to .ci/matrix
	@$(BIN)/python .ci/matrix $(ARGS)

dist: $(VENV)/.installed  ## build the sdist and the wheel in dist/, and check them
	@$(BIN)/python -m tests.distribution --out dist

test-dist: $(VENV)/.installed  ## build both, and use the wheel in new environments: trainer, predictor, command line
	@$(BIN)/python -m tests.distribution

bench: $(VENV)/.installed  ## run all benchmarks and fill the table in benchmarks/README.md; needs an idle machine
	@$(BIN)/python -W ignore -m benchmarks

bench-gpu: $(INSTALLED)  ## run the benchmark on a GPU, or a tiny one everywhere with DEVICE=simulated
	@$(PYTHON) .ci/gpu bench --device $(DEVICE) $(ARGS)

docs: $(VENV)/.installed  ## build the site of the documents and the reference in docs-output/; warnings fail
	@$(BIN)/python -W ignore -m sphinx --quiet --fresh-env --fail-on-warning --keep-going -c .ci/docs . docs-output

lint: $(VENV)/.installed  ## check code and format
	@$(BIN)/python -m ruff check $(CODE)
	@$(BIN)/python -m ruff format --check $(CODE)

types: $(VENV)/.installed  ## check types
	@$(BIN)/python -m mypy

format: $(VENV)/.installed  ## format the code and apply automatic fixes
	@$(BIN)/python -m ruff check --fix-only --quiet $(CODE)
	@$(BIN)/python -m ruff format $(CODE)

clean:  ## remove .venv, caches, and the output of the demos and docs
	rm -rf $(VENV) demo-output failover-output docs-output dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find $(CODE) -name __pycache__ -type d -prune -exec rm -rf {} +

# Each stamp is written last, so that an interrupted install restarts with an empty environment.
$(VENV)/.requirements: requirements-cpu.txt
	@python=; for name in python3.11 python3; do \
	    if "$$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then python=$$name; break; fi; \
	done; \
	if [ -z "$$python" ]; then echo 'Python 3.11 or newer is missing: put python3.11 or python3 on PATH' >&2; exit 1; fi; \
	echo "[1/4] new environment in $(VENV)"; \
	"$$python" -m venv --clear $(VENV)
	@echo '[2/4] torch and its dependencies (the longest step)'
	@$(PIP) -c requirements-cpu.txt torch=="$$(sed -n 's/^torch==//p' requirements-cpu.txt)"
	@echo '[3/4] the other pinned packages'
	@$(PIP) --no-deps -r requirements-cpu.txt
	@touch $@

# The package had the name delta_tracker before. An environment with both names has two owners of one command.
$(VENV)/.installed: $(VENV)/.requirements pyproject.toml
	@echo '[4/4] delta_tracker itself'
	@PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip uninstall -qq -y delta_tracker
	@$(PIP) --no-deps --no-build-isolation -e .
	@touch $@

$(VENV)/triton/.installed: $(VENV)/.installed
	@rm -rf $(VENV)/triton
	@$(PIP) --no-deps --target $(VENV)/triton triton==$(TRITON)
	@touch $@
