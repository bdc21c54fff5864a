# One command for each habit. Every target sets up what it needs; .ci/run calls the same ones.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
JOBS   ?= $(shell echo $$((1 + $$(getconf _NPROCESSORS_ONLN)))) # tests wait for half of their time
PYTEST := -q -n $(strip $(JOBS)) --maxprocesses 4 --dist loadscope --no-loadscope-reorder --max-worker-restart 4
RUNS   ?= 10
KINDS  ?= order,shuffled,one-core,busy
INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt
STAMP  := $(VENV)/.installed
DEMO   := $(VENV)/.installed-demo # without linters, tests' tools and transformers

# Every test starts processes: none of them should compile everything anew, whatever this shell says about it.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help setup demo test flaky soak lint format bench clean
.DEFAULT_GOAL := help

help:  ## what each target does
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-8s %s\n", $$1, $$2}'

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit("Anabranch needs Python >= 3.11, this is " + sys.version if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)

$(STAMP): pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) -e '.[worker,test,lint]'
	touch $(STAMP)

$(DEMO): pyproject.toml constraints.txt | $(BIN)/python
	test -e $(STAMP) || $(INSTALL) -e '.[worker]'
	touch $(DEMO)

setup: $(STAMP)  ## virtual environment with everything pinned in constraints.txt

demo: $(DEMO)  ## three unequal workers train one model on this machine for two minutes
	$(BIN)/anabranch demo

test: $(STAMP)  ## the whole test suite, with a real server, real processes and a real browser
	$(BIN)/python -m tests.tools --install
	$(BIN)/python -m pytest $(PYTEST)

flaky: $(STAMP)  ## the suite RUNS times (10): in order, shuffled, on one core, beside a busy loop; writes a JSON, too
	$(BIN)/python -m tests.tools --install
	$(BIN)/python -m tests.flaky --runs $(RUNS) --kinds $(KINDS) -- $(PYTEST)

soak: $(STAMP)  ## the promises' long forms (10 minutes); writes docs/results/*.json, or into ANABRANCH_RESULTS
	$(BIN)/python -m pytest -q -s -m soak -o faulthandler_timeout=0 tests/promises tests/scripts

lint: $(STAMP)  ## ruff and strict type checking
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(STAMP)  ## speed of merge, core and Muon, cost of the journal; writes docs/results/*.json
	$(BIN)/python -m benchmarks.merge_speed
	$(BIN)/python -m benchmarks.core_speed
	$(BIN)/python -m benchmarks.journal_cost
	$(BIN)/python -m benchmarks.muon_speed

format: $(STAMP)  ## let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove the virtual environment and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache *.egg-info
