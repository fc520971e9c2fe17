# make demo   create the environment and run the demo: tables, a page, figures and an HDF5 file in demo_output/
# make test   create the environment and run the tests
# make quick  run the tests but for those that take long
# make test-all   all tests, those of every benchmark, recipe and notebook too
# make lint   ruff: rules and formatting         make format   let ruff rewrite the files
# make types  pyright on the package             make clean    remove the environment and all output
# make docs   build the documentation site in site/; warnings are errors
# make coverage   the tests, and which lines of the package none of them ran
# make lowest     the tests with the lowest versions that pyproject.toml allows, in an environment of their own
# make dist       build the wheel and the source archive in dist/ and check them; nothing is uploaded
#
# Only Python 3.10+ and make are needed. PYTHON=/path/to/python3 chooses an interpreter, VENV=dir another
# place for the environment, PIP_FLAGS="..." is handed to pip (an index with CPU-only wheels, say).

VENV      ?= .venv
PIP_FLAGS ?=
# uv installs the lowest versions: UV_FLAGS="--torch-backend cpu" takes wheels without CUDA.
LOWEST    ?= .venv-lowest
UV_FLAGS  ?=
# In the order of their names: by default files with many tests go first, and the slow ones with few come last, alone.
PYTEST_FLAGS ?= -n 2 --dist loadfile --no-loadscope-reorder
DEMO_FLAGS ?=

# Python keeps what it has compiled: pip leaves that to it (below), and the tests start many processes.
unexport PYTHONDONTWRITEBYTECODE

BIN       := $(VENV)/bin
# The stamps are newer than pyproject.toml exactly while the environment is up to date.
# Without compiling all files of all packages, a third of the time: Python compiles those that it imports.
DEMO_ENV  := $(VENV)/.installed-demo
DEV_ENV   := $(VENV)/.installed-dev
DOCS_ENV  := $(VENV)/.installed-docs

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-all quick coverage lowest docs dist lint format types clean

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

demo: $(DEMO_ENV)
	$(BIN)/python -m posthoc_uq demo --force $(DEMO_FLAGS)

test: $(DEV_ENV)
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest $(PYTEST_FLAGS) -m "not study"

test-all: $(DEV_ENV)
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest $(PYTEST_FLAGS)

coverage: $(DEV_ENV)
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest $(PYTEST_FLAGS) --cov --cov-report=term --cov-report=html

quick: $(DEV_ENV)
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest $(PYTEST_FLAGS) -m "not slow and not study"

lowest: $(LOWEST)/.installed-lowest
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(LOWEST)/bin/python -m pytest $(PYTEST_FLAGS)

docs: $(DOCS_ENV)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

dist: $(BIN)/python
	$(BIN)/python -m pip install --quiet $(PIP_FLAGS) build twine
	rm -rf dist
	$(BIN)/python -m build --quiet
	$(BIN)/python -m twine check --strict dist/*
	ls -l dist

lint: $(DEV_ENV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(DEV_ENV)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(DEV_ENV)
	$(BIN)/pyright --pythonpath $(BIN)/python

clean:
	rm -rf $(VENV) $(LOWEST) demo_output build dist site .pytest_cache .ruff_cache

$(DOCS_ENV): pyproject.toml | $(BIN)/python
	@echo "Installing posthoc_uq and the tools of its site into $(VENV)"
	$(BIN)/python -m pip install --quiet --no-compile $(PIP_FLAGS) --editable '.[docs]'
	@touch $@

# A Python of 3.10 or newer that can make environments; PYTHON, where given, is the only one asked.
$(BIN)/python:
	@for python in $(or $(PYTHON),python3 python3.13 python3.12 python3.11 python3.10 python3.14 python); do \
	    $$python -c 'import sys; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1 || continue; \
	    found=$$python; \
	    $$python -c 'import venv, ensurepip' >/dev/null 2>&1 || continue; \
	    echo "Creating $(VENV) with $$($$python --version) ($$(command -v $$python))"; \
	    exec $$python -m venv $(VENV); \
	done; \
	if [ -n "$$found" ]; then \
	    echo "$$found has no venv or ensurepip module, which a virtual environment needs." >&2; \
	    echo "On Debian and Ubuntu: apt install python3-venv. Or name another one: make PYTHON=/path/to/python3" >&2; \
	else \
	    echo "No Python 3.10 or newer was found. Install one, or name it: make PYTHON=/path/to/python3" >&2; \
	fi; exit 1

$(DEMO_ENV): pyproject.toml | $(BIN)/python
	@echo "Installing posthoc_uq and its dependencies into $(VENV) (the first time takes some minutes)"
	$(BIN)/python -m pip install --quiet --no-compile $(PIP_FLAGS) --editable '.[demo]'
	@touch $@

# dev contains demo, so that one environment serves both.
$(DEV_ENV): pyproject.toml | $(BIN)/python
	@echo "Installing posthoc_uq and its development tools into $(VENV) (the first time takes some minutes)"
	$(BIN)/python -m pip install --quiet --no-compile $(PIP_FLAGS) --editable '.[dev]'
	@touch $(DEMO_ENV) $@

# Python 3.10, and of everything that pyproject.toml names the lowest version that it allows.
$(LOWEST)/.installed-lowest: pyproject.toml
	@$(MAKE) --no-print-directory VENV=$(LOWEST) PYTHON=$(or $(PYTHON),python3.10) $(LOWEST)/bin/python
	@echo "Installing posthoc_uq and the lowest versions of its dependencies into $(LOWEST)"
	$(LOWEST)/bin/python -m pip install --quiet $(PIP_FLAGS) uv
	$(LOWEST)/bin/python -m uv pip install --quiet --python $(LOWEST)/bin/python --resolution lowest-direct $(UV_FLAGS) \
	    --editable '.[dev]'
	@touch $@
