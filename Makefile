# make demo | test | test-all | lint | bench
#
# On first use a virtual environment is made in $(VENV) and the pinned dependencies are installed.
#   make test PYTHON=/path/to/python       use a ready environment, install nothing
#   make test VENV=/path/to/venv           make or reuse the environment there
#   make test BASE_PYTHON=python3.12       the interpreter that the environment is made with
#   make test TORCH_PIP_OPTIONS="..."      further options for pip when it installs torch (an index of CPU builds, say)

SHELL := /bin/bash
BASE_PYTHON ?= python3
VENV ?= .venv
TORCH_PIP_OPTIONS ?=
TEST_PROCESSES ?= 2

ifdef PYTHON
READY :=
else
PYTHON := $(VENV)/bin/python
READY := $(VENV)/.installed
endif

export PYTHONPATH := $(CURDIR)/src
# several processes share one machine's cores; more threads each would only make them wait for one another
export OMP_NUM_THREADS ?= 1

.PHONY: demo test test-all lint lint-format lint-style lint-types lint-layers bench format

demo: $(READY)
	PYTHON="$(PYTHON)" bash examples/demo.sh

test: $(READY)
	$(PYTHON) -m pytest -q --numprocesses $(TEST_PROCESSES) --dist loadfile

# with the cases that are marked as slow: further models and plans for what the tests show of others
test-all: $(READY)
	$(PYTHON) -m pytest -q -m "slow or not slow" --numprocesses $(TEST_PROCESSES) --dist loadfile

lint: lint-format lint-style lint-types lint-layers

lint-format: $(READY)
	$(PYTHON) -m ruff format --check .

lint-style: $(READY)
	$(PYTHON) -m ruff check .

lint-types: $(READY)
	$(PYTHON) -m mypy

lint-layers: $(READY)
	$(PYTHON) -c "from importlinter.cli import lint_imports_command; lint_imports_command()"

format: $(READY)
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

bench: $(READY)
	$(PYTHON) -m benchmarks.step_time
	$(PYTHON) -m benchmarks.compile_time

# torch comes first and alone, so that the build which TORCH_PIP_OPTIONS prefers is the one that stays;
# pip must not see src, whose metadata it would take for an installed package
$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(VENV)/bin/python || $(BASE_PYTHON) -m venv $(VENV)
	env -u PYTHONPATH $(VENV)/bin/python -m pip install --quiet $(TORCH_PIP_OPTIONS) torch==2.13.0
	env -u PYTHONPATH $(VENV)/bin/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@
