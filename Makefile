# Two commands for a newcomer: `make demo` and `make test`. Both need Python 3.11+ and make.
# The environment is .venv, made again when pyproject.toml or constraints.txt change. The demo
# installs only the trainer; the tests install everything.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO_STAMP := $(VENV)/.demo
PIP := $(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt

# Tests build their models from configs. One thread for each of the two pytest workers; the tests of
# a file share its fixtures in one of them.
export HF_HUB_OFFLINE ?= 1
TEST_ENV := OMP_NUM_THREADS=1
WORKERS ?= 2
PYTEST := $(TEST_ENV) $(BIN)/pytest -q -n $(WORKERS) --dist loadfile

.PHONY: help demo test lint pytest oldest next slow golden faults mutants screenshots docs format install clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## /{printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(DEMO_STAMP)  ## a small model learns in minutes, then one picture of the filters
	$(BIN)/mesotron train
	$(BIN)/mesotron optim spectrum muon pion --cutoff aligned --brief

test: lint docs pytest  ## lint, types, the site and every test that is not slow

lint: $(STAMP)  ## ruff and pyright
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

pytest: $(STAMP)
	$(PYTEST)

# Only TRL differs, so it is installed aside and found first. 1.15 needs Triton on a CPU too.
OLDEST_TRL := 1.15.0
OLDEST := $(VENV)/oldest
oldest: $(STAMP)  ## the trainer's tests with the oldest supported TRL
	@test -d $(OLDEST)/trl-$(OLDEST_TRL).dist-info || $(BIN)/python -m pip install -q \
	--disable-pip-version-check --no-deps --upgrade --target $(OLDEST) trl==$(OLDEST_TRL) triton
	PYTHONPATH=$(OLDEST) $(PYTEST) tests/rlvr tests/tasks tests/answers tests/models tests/sampling tests/rewards tests/evaluate tests/serve

# What is about to come, installed aside as well. Its failures are read, not mended at once: the
# target ends well.
NEXT := $(VENV)/next
next: $(STAMP)  ## report on the newest TRL, Transformers, Triton and NumPy, pre-releases too
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps --upgrade --pre \
	--target $(NEXT) trl transformers triton numpy
	@$(BIN)/python -m pip list --disable-pip-version-check --path $(NEXT)
	-PYTHONPATH=$(NEXT) $(PYTEST) tests/rlvr/test_overrides.py tests/rlvr/test_options.py \
	tests/rlvr/test_trl_trainer.py tests/rlvr/test_grpo.py tests/optim/triton

slow: $(STAMP)  ## every test, the slow ones too
	$(PYTEST) -m "slow or not slow"

faults: $(STAMP)  ## kill, damage, fuzz and cheat the program for half an hour; prints a table
	PYTHONPATH=src:tests:. $(TEST_ENV) $(BIN)/python -P -m faults

SEED ?= 0
NUM ?= 200
mutants: $(STAMP)  ## change the package at NUM random places (SEED=0 NUM=200): do tests notice?
	PYTHONPATH=src:tests:. $(TEST_ENV) $(BIN)/python -P -m mutants --seed $(SEED) --num $(NUM)

golden: $(STAMP)  ## bit-equal runs of BASE=REV and today's code; ONLY="NAME.." picks cases or rooms
	PYTHONPATH=src:tests $(BIN)/python -m golden against $(BASE) $(if $(ONLY),--only $(ONLY))

screenshots: $(STAMP)  ## retake the documentation's screenshots of the report (needs chromium)
	MESOTRON_SCREENSHOTS=1 $(TEST_ENV) $(BIN)/pytest -q tests/report/test_browser.py -k screenshots

docs: $(STAMP)  ## the documentation as a site, in site/; a wrong link fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

format: $(STAMP)  ## let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

install: $(STAMP)  ## only make .venv

INSTALL_TORCH = $(PIP) torch==2.13.0

$(STAMP): pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing into $(VENV); torch is large, the first time takes some minutes"
	$(INSTALL_TORCH)
	$(PIP) -e '.[dev]'
	@touch $(STAMP) $(DEMO_STAMP)

$(DEMO_STAMP): pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing PyTorch and TRL into $(VENV); the first time takes some minutes"
	$(INSTALL_TORCH)
	$(PIP) -e '.[rlvr]'
	@touch $(DEMO_STAMP)

$(BIN)/python:
	@test -x $(BIN)/python || $(PYTHON) -c 'import sys; sys.exit("mesotron needs Python 3.11 or newer, \
	and $(PYTHON) is older: try make PYTHON=python3.12") if sys.version_info < (3, 11) else 0'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)

clean:  ## remove the environment, caches and builds
	rm -rf $(VENV) site dist .pytest_cache .ruff_cache
