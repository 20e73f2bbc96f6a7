# One way to do each thing. `make setup` makes .venv; every other target makes sure of it first.
.DEFAULT_GOAL := help
SHELL := /bin/bash
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# The tests use real Ray, vLLM and Redis processes on loopback; nothing is reported anywhere.
export RAY_USAGE_STATS_ENABLED := 0
export VLLM_NO_USAGE_STATS := 1
export DO_NOT_TRACK := 1
export HF_HUB_OFFLINE := 1

.PHONY: help setup demo serve test check bench bench-router format clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

setup: $(STAMP) ## make .venv with the locked CPU packages (idempotent)

$(STAMP): requirements/cpu.lock requirements/dev.lock requirements/setup.sh pyproject.toml
	@PYTHON=$(PYTHON) VENV=$(VENV) bash requirements/setup.sh
	@touch $@

demo: $(STAMP) ## start a real cluster here, replay agent programs, print the comparison, stop
	@$(BIN)/caesura demo

serve: $(STAMP) ## serve in the foreground (CONFIG=file.yaml to choose)
	@$(BIN)/caesura serve $(if $(CONFIG),--config $(CONFIG))

test: $(STAMP) ## all tests; a process can have one Ray
	@$(BIN)/python -m pytest -m "not own_ray"
	@$(BIN)/python -m pytest -m own_ray

check: $(STAMP) ## what CI checks beside the tests: format, lint, types, import rules
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-cache

format: $(STAMP) ## format and fix what can be fixed
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

bench: $(STAMP) ## the micro-benchmarks of benchmarks/README.md
	@$(BIN)/python -m benchmarks

bench-router: $(STAMP) ## routers side by side in the simulator, 16 replicas (long: about an hour of one core)
	@$(BIN)/python -m benchmarks.router

clean: ## remove what the targets made
	rm -rf $(VENV) .cache .mypy_cache .ruff_cache .pytest_cache out
