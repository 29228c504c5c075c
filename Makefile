# On a fresh machine: `make quickstart` trains a small model, `make test` runs the tests.
# Both install into .venv first, in the versions of constraints.txt, and only when those have changed.

PYTHON ?= python3
ARGS   ?=

VENV      := .venv
BIN       := $(VENV)/bin
PIP       := $(BIN)/python -m pip --disable-pip-version-check --no-input
INSTALLED := $(VENV)/.installed
BENCH     := $(VENV)/.installed-for-bench

.DEFAULT_GOAL := help
.PHONY: help install quickstart test test-full lint bench clean

help: ## show this list
	@echo "make TARGET [PYTHON=python3.12] [ARGS='...']"
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(firstword $(MAKEFILE_LIST)) | expand -t 14 | sed 's/^/  /'

install: $(INSTALLED) ## virtual environment in .venv, pinned versions, this package in place

quickstart: install ## train recipes/quickstart.yaml; ARGS='trainer.max_epochs=2' overrides values
	$(BIN)/python train.py --config recipes/quickstart.yaml $(ARGS)

test: install ## the tests, without the long ones; ARGS goes to pytest
	$(BIN)/python -m pytest -m "not full" $(ARGS)

test-full: install ## all tests
	$(BIN)/python -m pytest $(ARGS)

lint: install ## ruff, mypy, and the direction of imports
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(BENCH) ## loaders against each other: benchmarks/loader.py; ARGS goes to it
	$(BIN)/python benchmarks/loader.py $(ARGS)

clean: ## remove .venv, builds and caches; runs/ stays
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The version is checked before a virtual environment is made from it: pip's own refusal comes minutes later.
# torch goes first and alone, so that nothing later chooses another build of it. On Linux, PyPI has the build
# for CUDA; PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu before `make` gives the smaller one.
$(INSTALLED): pyproject.toml constraints.txt
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { \
	  $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "Python 3.11 or newer is needed, and '$(PYTHON)' is not; name another: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; \
	    exit 1; }; \
	  echo "$(PYTHON) -m venv $(VENV)"; $(PYTHON) -m venv $(VENV); }
	$(PIP) install -c constraints.txt torch
	$(PIP) install -c constraints.txt -e '.[dev]'
	@touch $@

# The loader that the benchmark compares with is nothing that this package needs.
$(BENCH): benchmarks/requirements.txt $(INSTALLED)
	$(PIP) install -c constraints.txt -r benchmarks/requirements.txt
	@touch $@
