# Two commands for a newcomer: `make demo` and `make test`. Both need Python 3.11+ and make.
# The environment is .venv; it is made once and again when pyproject.toml or constraints.txt change.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt

# Tests build their models from configs. One thread for each of the two pytest workers.
export HF_HUB_OFFLINE ?= 1
TEST_ENV := OMP_NUM_THREADS=1
WORKERS ?= 2

.PHONY: help demo test lint pytest oldest slow screenshots docs format install clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## /{printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# One thread: the model is too small for more, which wait for each other where other programs run.
demo: $(STAMP)  ## what the filters do to a spectrum, then reinforcement learning in minutes
	$(BIN)/mesotron spectrum
	OMP_NUM_THREADS=1 $(BIN)/mesotron train --threads 1

test: lint pytest  ## lint, types and every test that is not slow

lint: $(STAMP)  ## ruff and pyright
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

pytest: $(STAMP)
	$(TEST_ENV) $(BIN)/pytest -q -n $(WORKERS)

# Only TRL differs, so it is installed aside and found first. 1.15 needs Triton on a CPU too.
OLDEST_TRL := 1.15.0
OLDEST := $(VENV)/oldest
oldest: $(STAMP)  ## the trainer's tests with the oldest supported TRL
	@test -d $(OLDEST)/trl-$(OLDEST_TRL).dist-info || $(BIN)/python -m pip install -q \
	--disable-pip-version-check --no-deps --upgrade --target $(OLDEST) trl==$(OLDEST_TRL) triton
	PYTHONPATH=$(OLDEST) $(TEST_ENV) $(BIN)/pytest -q -n $(WORKERS) tests/rlvr

slow: $(STAMP)  ## every test, the slow ones too
	$(TEST_ENV) $(BIN)/pytest -q -n $(WORKERS) -m "slow or not slow"

screenshots: $(STAMP)  ## retake the documentation's screenshots of the report (needs chromium)
	MESOTRON_SCREENSHOTS=1 $(TEST_ENV) $(BIN)/pytest -q tests/report/test_browser.py -k screenshots

docs: $(STAMP)  ## the documentation as a site, in site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

format: $(STAMP)  ## let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

install: $(STAMP)  ## only make .venv

$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -c 'import sys; sys.exit("mesotron needs Python 3.11 or newer, \
	and $(PYTHON) is older: try make PYTHON=python3.12") if sys.version_info < (3, 11) else 0'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV); torch is large, the first time takes some minutes"
	$(PIP) torch==2.13.0
	$(PIP) -e '.[dev]'
	@touch $(STAMP)

clean:  ## remove the environment, caches and builds
	rm -rf $(VENV) site dist .pytest_cache .ruff_cache
