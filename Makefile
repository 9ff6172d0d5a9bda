# Needs Python 3.10 or later and make; every target installs what it lacks, once, into .venv.
PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --quiet --constraint constraints.txt --editable
# Two test workers with one thread each do not compete for the cores.
PYTEST := OMP_NUM_THREADS=1 MPLBACKEND=Agg $(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder
INPUTS := pyproject.toml constraints.txt

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all test-gpu lint docs bench speed attack tables format clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1	/p' $(MAKEFILE_LIST) | expand -t 12

setup: .venv/setup.stamp  ## make .venv and install the package with its development tools

demo: .venv/setup.stamp  ## one network, four jobs: train it on digits and write runs/demo/report.html
	$(BIN)/iresnet demo

test: lint  ## everything a change must pass: format, lint, types, layers, tests (five minutes)
	$(PYTEST)

test-all: lint  ## the same with the slow tests, and the coverage of all of them
	$(PYTEST) --cov -m ""

test-gpu: .venv/setup.stamp  ## the tests that need a GPU, the slow ones too
	MPLBACKEND=Agg $(BIN)/python -m pytest -m gpu -rs tests

lint: .venv/setup.stamp  ## format, lint, types and layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

docs: .venv/docs.stamp  ## build the documentation into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

bench: .venv/bench.stamp  ## measure what results/*.json claim (three quarters of an hour)
	$(BIN)/python benchmarks/core.py
	$(BIN)/python benchmarks/toy.py
	$(BIN)/python benchmarks/demo.py
	$(BIN)/python benchmarks/scores.py

speed: .venv/bench.stamp  ## iresnet bench on a CPU: results/bench-cpu.json, its plots and its tables (fifteen minutes)
	$(BIN)/iresnet bench --device cpu --out results/bench-cpu.json
	$(BIN)/python -m tools.speed
	$(BIN)/python -m tools.tables

attack: .venv/setup.stamp  ## try to break what the library proves and promises: 100,000 cases, results/attack.json
	OMP_NUM_THREADS=1 $(BIN)/python -m attack --out results/attack.json

tables: .venv/setup.stamp  ## rewrite the generated tables in README.md and docs/
	$(BIN)/python -m tools.tables

format: .venv/setup.stamp  ## format the code and sort its imports
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .

clean:  ## remove everything that can be made again, .venv included
	rm -rf .venv .coverage* .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache build dist htmlcov site
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# pip is the last thing that venv makes: where it exists, the environment is whole.
$(BIN)/pip:
	$(PYTHON) -m venv .venv

.venv/setup.stamp: $(INPUTS) | $(BIN)/pip
	@echo "Installing into .venv: a few minutes, once."
	@$(INSTALL) '.[dev]'
	@touch $@

.venv/bench.stamp: $(INPUTS) | .venv/setup.stamp
	@echo "Installing what the benchmarks compare with into .venv, once."
	@$(INSTALL) '.[dev,bench]'
	@touch $@

.venv/docs.stamp: $(INPUTS) | $(BIN)/pip
	@echo "Installing the documentation's tools into .venv, once."
	@$(INSTALL) '.[docs]'
	@touch $@
