# Every command sets itself up: Python 3.11, make and git are enough.
.DEFAULT_GOAL := help
.PHONY: help setup demo check compiled test test-all test-agents test-redteam test-cheats test-images test-compose test-leaks test-real test-trainers test-vllm test-families test-serving test-hosts test-charts fmt build chaos bench learn clean

PYTHON ?= $(shell command -v python3.11 || command -v python3)
UV := $(shell command -v uv || echo .uv/bin/uv)
EXTRAS := --extra laptop --extra e2b --extra daytona --extra kubernetes --extra encryption --extra swebench --extra traces
RUN := $(UV) run --frozen $(EXTRAS)
SEEDS ?= 1
ROLLOUTS ?= 24
SUITES := tests/integration tests/contracts tests/unit tests/workflows

help: ## list the commands
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: ## uv, the locked environment, bubblewrap
	@command -v $(UV) >/dev/null || infra/setup/uv $(PYTHON)
	@$(UV) sync -q --frozen --inexact $(if $(wildcard .venv),,--compile-bytecode) $(EXTRAS)
	@.venv/bin/python -m compileall -q src activities workflows workers
	@infra/setup/bubblewrap

demo: ## real instances, three agents, a result table: under three minutes
	@infra/setup/aloud "setting up the locked environment" $(MAKE) --no-print-directory setup
	@$(RUN) perdure demo

check: setup ## ruff, format, mypy --strict, import contracts
	@$(RUN) ruff check .
	@$(RUN) ruff format --check .
	@$(RUN) mypy
	@$(RUN) lint-imports

compiled: setup # in one process: else each process of `test` compiles all that it imports
	@$(RUN) pytest -qq -n 0 --collect-only $(SUITES) >/dev/null

test: setup ## check, then unit, contract, workflow and integration tests, in minutes
	@$(MAKE) --no-print-directory -j2 check compiled
	@$(RUN) pytest --timeout 240 -m "not longer" $(SUITES)

test-all: test ## test, then the longer tests of the same suites: what CI runs
	@$(RUN) pytest --timeout 240 -m longer $(SUITES)

test-real: setup ## seven real SWE-bench rows, three times each, through the command line
	@$(RUN) pytest -rs tests/real/test_sdist_rows.py

test-trainers: setup ## the trainers' own packages over our entry points, in an environment of their own (slow)
	@$(RUN) pytest -rs tests/real/test_trainer_advantages.py tests/real/test_trainer_loops.py tests/real/test_trl.py

test-vllm: setup ## the engine client against a real vLLM on CPU, in an environment of its own (slow)
	@$(RUN) pytest -rs tests/real/test_vllm.py tests/real/test_vllm_weights.py

test-families: setup ## model families as published, beside the parsers of vLLM and SGLang (downloads once, slow)
	@$(RUN) pytest -rs tests/real/test_families.py

test-serving: setup ## engines on real Ray nodes that are killed (slow)
	@$(RUN) --extra serving pytest tests/serving

test-hosts: setup ## four hosts played by namespaces: added, cut off, drained, lost, back (slow; root)
	@$(RUN) pytest -n 0 -rs -s tests/hosts

test-charts: setup ## the Helm chart rendered and checked against Kubernetes' schemas, both from PyPI
	@$(RUN) --with 'gotpl[helm]==0.1.0' --with kubernetes-validate==1.37.0 pytest -n 0 -rs tests/charts

test-agents: setup ## every agent from its registry, end to end in a sandbox (slow; downloads once)
	@$(RUN) pytest tests/agents

test-redteam: setup ## hostile code inside every local sandbox provider; it must fail
	@$(RUN) pytest -rs tests/redteam

test-cheats: setup ## ways to a reward without a fix, on three runners; all but known ones must fail (slow)
	@$(RUN) pytest -s tests/cheats

test-images: setup ## images in their publishers' layouts and pulls from a registry of this host, by podman (slow)
	@$(RUN) pytest -rs tests/images

test-compose: setup ## docker-compose.yml by podman, from an image of this checkout: graded episodes (slow; root)
	@$(RUN) --with podman-compose==1.5.0 pytest -n 0 -rs tests/compose

test-leaks: setup ## 250 random kill -9: no box, process, cgroup, mount or network is left (slow)
	@$(RUN) pytest -s tests/leaks

fmt: setup ## format and fix
	@$(RUN) ruff check --fix -q .
	@$(RUN) ruff format .

build: setup ## the wheel, installed bare, its client imported
	@$(UV) build -q --wheel
	@infra/setup/check_wheel

chaos: setup ## kill -9, SIGTERM and lost answers, with real processes (slow); SEEDS=1,2 ROLLOUTS=200
	@$(RUN) --extra serving pytest -s tests/chaos --ray --seeds $(SEEDS) --rollouts $(ROLLOUTS)

bench: setup ## the benchmarks that need nothing else, one after the other (slow)
	@for b in overhead live crash sandbox gateway_load turn temporal routing gradings; do $(RUN) python -m benchmarks.$$b || exit 1; done

learn: SEEDS = 1,2,3
learn: setup ## a tiny model learns through the whole stack on two cores (slow; vLLM, 3.2 GB): SEEDS=2 OPTIONS='--staleness 1'
	@$(RUN) --extra serving python -m benchmarks.learn --seeds $(SEEDS) $(OPTIONS)

clean: ## remove the environment and everything local
	rm -rf .venv .uv dist .perdure .mypy_cache .ruff_cache .pytest_cache
