# Every target sets up .venv by itself the first time (pip takes a few minutes), with any Python from 3.11 on.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3.14 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SOURCES := longstraw tests examples benchmarks

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint types format examples zoo bench hooks clean

help:  ## this list
	@sed -n 's/^\([a-z]*\):[^#]*##/\1\t/p' $(MAKEFILE_LIST)

setup: $(STAMP)  ## create .venv with the package, editable, and all development tools

$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || test -n '$(PYTHON)' || { echo 'longstraw needs Python 3.11 or newer: make PYTHON=/path/to/python'; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo 'installing into $(VENV): the first time takes a few minutes'
	$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

demo: $(STAMP)  ## a GRPO step on real text, eager against longstraw: a table and a plot (about 3 minutes)
	$(BIN)/python examples/quickstart.py

test: $(STAMP)  ## the tests
	$(BIN)/python -m pytest -n auto

lint: $(STAMP)  ## ruff (format and rules) and mypy
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/mypy

types: $(STAMP)  ## mypy alone
	$(BIN)/mypy

format: $(STAMP)  ## rewrite the sources as lint wants them
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/ruff check --fix $(SOURCES)

examples: $(STAMP)  ## every example in its short form, two at a time
	ls examples/*.py | xargs -P 2 -I {} sh -c 'out=$$($(BIN)/python {} --quick 2>&1); s=$$?; echo "== {}"; echo "$$out"; exit $$s'

zoo: $(STAMP)  ## the slow sweep: every decoder of transformers that can be built small
	$(BIN)/python -m pytest -n auto -m zoo

bench: $(STAMP)  ## the benchmarks with all their promises checked (about 20 minutes)
	$(BIN)/python benchmarks/step.py --check
	$(BIN)/python benchmarks/plan.py --check

hooks: $(STAMP)  ## install the git hooks
	$(BIN)/pre-commit install

clean:  ## remove caches and results, keep .venv
	rm -rf out build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +
