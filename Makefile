# Everything starts from a machine with only Python 3.11 and pip.

VENV     ?= .venv
PLATFORM ?= cpu
PYTHON   ?= $(or $(shell for each in python3.11 python3; do \
              $$each -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null \
              && echo $$each && break; done),python3)
BIN      := $(VENV)/bin
SETUP    := $(PYTHON) tools/setup_env.py --venv $(VENV) --platform $(PLATFORM)
SOURCES  := $(wildcard vllm_omni tests tools examples benchmarks recipes)

.DEFAULT_GOAL := help
.PHONY: help install install-dev demo test lint format lock clean

help: ## show this
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: ## make the environment that serving needs (PLATFORM=cuda for NVIDIA)
	@$(SETUP)

install-dev: ## the same, and what tests and lint need
	@$(SETUP) --dev

demo: install ## start a tiny model on this CPU and talk to it
	@$(BIN)/python examples/demo.py

test: lint ## lint, then the test suite (ARGS="-k name" to choose)
	@$(BIN)/python tools/run_tests.py $(ARGS)

lint: install-dev ## ruff, formatting, and which package may import which
	@$(BIN)/ruff check $(SOURCES)
	@$(BIN)/ruff format --check --quiet $(SOURCES) || { echo "run: make format"; exit 1; }
	@$(BIN)/lint-imports >/dev/null || $(BIN)/lint-imports

format: install-dev ## rewrite the sources as lint wants them
	@$(BIN)/ruff check --fix --quiet $(SOURCES) || true
	@$(BIN)/ruff format $(SOURCES)

lock: install-dev ## write requirements/*.txt from what is installed
	@$(BIN)/python tools/lock.py

clean: ## remove the environment and every cache
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +
