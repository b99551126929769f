# Every command sets itself up: Python 3.11, make and git are enough.
.DEFAULT_GOAL := help
.PHONY: help setup demo check compiled test test-all test-everything test-agents test-redteam test-cheats test-languages test-images test-compose test-leaks test-real test-trainers test-vllm test-families test-serving test-hosts test-charts fmt build chaos bench learn clean

PYTHON ?= $(shell command -v python3.11 || command -v python3)
UV := $(shell command -v uv || echo .uv/bin/uv)
EXTRAS := --extra laptop --extra e2b --extra daytona --extra modal --extra kubernetes --extra encryption --extra swebench --extra traces
RUN := $(UV) run --frozen $(EXTRAS)
SEEDS ?= 1
ROLLOUTS ?= 24
SUITES := tests/integration tests/workflows tests/contracts tests/unit

help: ## list the commands
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: ## install uv, the locked environment and bubblewrap
	@command -v $(UV) >/dev/null || infra/setup/uv $(PYTHON)
	@$(UV) sync -q --frozen --inexact $(if $(wildcard .venv),,--compile-bytecode) $(EXTRAS)
	@.venv/bin/python -m compileall -q src activities workflows workers
	@infra/setup/bubblewrap

demo: ## run three agents on real instances and print a result table: under three minutes
	@infra/setup/run_with_progress "setting up the locked environment" $(MAKE) --no-print-directory setup
	@$(RUN) perdure demo

check: setup ## run ruff, the format check, mypy --strict and the import contracts
	@$(RUN) ruff check .
	@$(RUN) ruff format --check .
	@$(RUN) mypy
	@$(RUN) lint-imports

compiled: setup # in one process; otherwise each process of `test` would compile what it imports
	@$(RUN) pytest -qq -n 0 --collect-only $(SUITES) >/dev/null

test: setup ## run check, then the unit, contract, workflow and integration tests, in minutes
	@$(MAKE) --no-print-directory -j2 check compiled
	@$(RUN) pytest --timeout 240 -m "not longer" $(SUITES)

test-all: test ## run test, then the longer tests of the same suites, as CI does
	@$(RUN) pytest --timeout 600 -m longer $(SUITES)

test-everything: TARGETS ?= test-all build test-redteam test-hosts test-leaks test-cheats test-languages test-images test-compose test-agents test-families test-charts test-real test-trainers test-vllm test-serving chaos
test-everything: setup ## run all suites, one after the other, and print a table (hours; root): TARGETS='chaos test-leaks'
	@infra/setup/run_suites .perdure/suites $(TARGETS)

test-real: setup ## run seven real SWE-bench rows three times each, by the command line
	@$(RUN) pytest -rs tests/real/test_sdist_rows.py

test-trainers: setup ## test our entry points with the real trainers, in a separate environment (slow)
	@$(RUN) pytest -rs tests/real/test_trainer_advantages.py tests/real/test_trainer_loops.py tests/real/test_trl.py tests/real/test_router_replay.py

test-vllm: setup ## test the engine client with a real vLLM on CPU, in a separate environment (slow)
	@$(RUN) pytest -rs tests/real/test_vllm.py tests/real/test_vllm_weights.py

test-families: setup ## compare our parsers of published model families with vLLM's and SGLang's (downloads once, slow)
	@$(RUN) pytest -rs tests/real/test_families.py

test-serving: setup ## test engines on real Ray nodes and kill the nodes (slow)
	@$(RUN) --extra serving pytest tests/serving

test-hosts: setup ## simulate four hosts by namespaces, and Slurm nodes: add, cut off, drain, lose, restore (slow; root)
	@$(RUN) pytest -n 0 -rs -s tests/hosts

test-charts: setup ## render the Helm chart and check it against Kubernetes' schemas, with tools from PyPI
	@$(RUN) --with 'gotpl[helm]==0.1.0' --with kubernetes-validate==1.37.0 pytest -n 0 -rs tests/charts

test-agents: setup ## install every agent from its package registry and run it in a sandbox (slow; downloads once)
	@$(RUN) pytest tests/agents

test-redteam: setup ## run hostile code in every local sandbox provider; it must fail
	@$(RUN) pytest -rs tests/redteam

test-cheats: setup ## try to get a reward without a fix, on three test runners; all but known ways must fail (slow)
	@$(RUN) pytest -s tests/cheats

test-languages: setup ## prove twins on made rows in JavaScript, Go, Rust, Java and C; all forgers must fail (slow)
	@$(RUN) pytest -n 0 -rs -s tests/languages

test-images: setup ## test images in their publishers' layouts, and pulls from a local registry, by podman (slow)
	@$(RUN) pytest -rs tests/images

test-compose: setup ## start docker-compose.yml by podman from this checkout and grade episodes (slow; root)
	@$(RUN) --with podman-compose==1.5.0 pytest -n 0 -rs tests/compose

test-leaks: setup ## kill -9 at 250 random moments: no sandbox, process, cgroup, mount or network may be left (slow)
	@$(RUN) pytest -s tests/leaks

fmt: setup ## format the code and apply ruff's fixes
	@$(RUN) ruff check --fix -q .
	@$(RUN) ruff format .

build: setup ## build the wheel, install it in a bare environment and run the demo from it
	@$(UV) build -q --clear
	@infra/setup/check_wheel

chaos: setup ## kill real processes with -9 and SIGTERM, and lose answers (slow); SEEDS=1,2 ROLLOUTS=200
	@$(RUN) --extra serving pytest -s tests/chaos --ray --seeds $(SEEDS) --rollouts $(ROLLOUTS)

bench: setup ## run the benchmarks that need no other software, one after the other (slow)
	@for b in overhead live crash deadline sandbox channel gateway_load turn mcp temporal routing gradings judge; do $(RUN) python -m benchmarks.$$b || exit 1; done

learn: SEEDS = 1,2,3
learn: setup ## train a tiny model through the whole stack on two cores (slow; vLLM, 3.2 GB): SEEDS=2 OPTIONS='--staleness 1'
	@$(RUN) --extra serving python -m benchmarks.learn --seeds $(SEEDS) $(OPTIONS)

clean: ## remove the environment, the caches and the local stack's data
	rm -rf .venv .uv dist .perdure .mypy_cache .ruff_cache .pytest_cache
