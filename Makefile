# From a fresh clone: `make demo` shows it, `make test` checks it. Both set up .venv first if it is missing.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
PYTHON ?= python3
BIN := .venv/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Tests start hundreds of processes: none should have to compile the package again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help setup demo test lint types unit soak bench bench-peers results docs dist clean
help:
	@echo "make demo    four methods on handwritten digits, with a report, in under two minutes"
	@echo "make test    lint, types and tests, in under six minutes"
	@echo "make soak    the long versions of the tests, and mutations that the tests must see"
	@echo "make bench   speed and memory as ratios, in under ten minutes on an idle machine"
	@echo "make bench-peers  the same round on other libraries, each in an environment of its own in .peers/"
	@echo "make results the campaign of long runs on real data goes on (days), and docs/results.md is written"
	@echo "make docs    the documents as a site, in site/"
	@echo "make dist    sdist and wheel in dist/, installed elsewhere and tried there, alone and with each extra"
	@echo "make clean   remove .venv, caches and the demo's run folders"

# The environment is as new as what defines it. pip is called as a module, so that a path with a space does no harm.
.venv/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "fednh needs Python 3.11 or newer; set PYTHON=..." >&2; exit 1; }
	@echo "Setting up .venv (once; a few minutes on a new machine)"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install -qq --constraint constraints.txt torch
	@$(BIN)/python -m pip install -qq --constraint constraints.txt --editable ".[dev,tensorboard,mlflow,wandb,flower,ray,tables,hf,onnx,backbones,text,privacy,docs]"
	@$(BIN)/python -m pip install -qq --constraint constraints.txt --no-deps timm  # its torchvision has no build for torch's CPU build: tests have a stand-in
	@touch $@

setup: .venv/ready

demo: setup
	@rm -rf demo
	@$(BIN)/python -m fednh sweep digits --method fednh,fedavg,fedrod,local --seed 0,1 --rounds 20 --set eval.every=2 --jobs 2 --out demo/runs
	@$(BIN)/python -m fednh table --short demo/runs
	@$(BIN)/python -m fednh report demo/runs -o demo/report.html --title "Four methods on handwritten digits"
	@echo "Open demo/report.html in a browser; the run folders are in demo/runs."

test: lint types unit

lint: setup
	@$(BIN)/python -m ruff check .
	@$(BIN)/python -m ruff format --check .
	@$(BIN)/python $(BIN)/lint-imports --no-logo --no-cache

types: setup
	@$(BIN)/python -m mypy

# One worker more than cores, because many tests wait for processes of their own.
unit: setup
	@$(BIN)/python -m pytest -n 3 --dist worksteal

soak: setup
	@$(BIN)/python -m pytest -m soak -n 2 --dist worksteal
	@$(BIN)/python tests/mutations/run.py

bench: setup
	@$(BIN)/python -m benchmarks

bench-peers: setup
	@$(BIN)/python -m benchmarks.peers

results: setup
	@$(BIN)/python -m tools.results

docs: setup
	@FEDNH_EXECUTE=1 NO_MKDOCS_2_WARNING=1 $(BIN)/python -W ignore -m mkdocs build --strict --quiet
	@echo "Open site/index.html in a browser; for the search box, serve it: $(BIN)/python -m http.server -d site"

dist: setup
	@$(BIN)/python tools/dist.py

clean:
	rm -rf .venv .peers demo dist runs site .mypy_cache .ruff_cache .pytest_cache .hypothesis
