# make up         install once, then serve the demo model on this machine's CPU until Ctrl-C
# make check      before every commit: lint (ruff, mypy), audit (of the locks) and test-fast (no vLLM, not slow)
# make test       the whole suite but for test-topology, which starts engines of several ranks or hosts; format: let ruff fix it
# make test-vllm-api  vLLM's own server tests, against a fleet and against a plain server; fuzz: hostile HTTP requests
# make docs       the documents as a site, in build/site; a link that leads nowhere fails
# make bench-kv   KV transfer figures; bench-policy: policy and queue figures; bench-peers: beside the field;
#                 chaos: faults under load, two hours; chaos-real: with real engines, three hours; soak: half an hour

SHELL  := /bin/bash
PYTHON ?= $(shell command -v python3.11 || command -v python3)
CONFIG ?= configs/demo-1p1d-cpu.yaml
LOCK   := requirements/cpu.lock
BIN    := .venv/bin
# The stamp's name holds the hash of what was installed: an unchanged lock installs nothing.
LOCKS  := $(LOCK) requirements/runtime-cpu.lock
DOCS   := requirements/docs.lock
STAMP  := .venv/.installed-$(shell cat $(LOCKS) pyproject.toml | sha256sum | cut -c1-16)

# Modules are compiled once, into .venv, which is our own: with this variable each process would compile them again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: up venv model check test test-fast test-slow test-topology test-vllm-api fuzz lint audit format docs bench-kv bench-policy bench-peers chaos chaos-real soak clean

up: venv
	@$(BIN)/orchestrator up $(CONFIG)

venv: $(STAMP)

$(STAMP): $(LOCKS) pyproject.toml
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "make: Python >= 3.11 is needed, '$(PYTHON)' is not; run make PYTHON=/path/to/python3.11" >&2; exit 2; }
	@"$(PYTHON)" -m venv .venv
	@rm -f .venv/.installed-*
	@$(BIN)/python requirements/install.py $(LOCK)
	@touch $@

model: venv
	@$(BIN)/python -m orchestrator.config.model

check: lint audit test-fast

test: test-fast test-slow

# More processes than two cores: half of the time of each passes in waits.
test-fast: venv
	$(BIN)/pytest -m "not vllm and not slow" -n 4 --dist worksteal

# By file: their tests share fleets and engines. Longest first, as tests/conftest.py has them, and not by the number of
# tests: files of one long test would come last, and one core idle meanwhile.
test-slow: model
	$(BIN)/pytest -m "(vllm or slow) and not topology" -n 4 --dist loadfile --no-loadscope-reorder

test-vllm-api: model
	PYTHONPATH=tests $(BIN)/python -m vllm_api --output benchmarks/results/vllm_api.txt

fuzz: model
	PYTHONPATH=tests $(BIN)/python -m http_fuzz --output benchmarks/results/fuzz.json

test-topology: venv
	$(BIN)/pytest -m topology tests/e2e/test_topology.py tests/e2e/test_real_groups.py tests/e2e/test_ray.py tests/e2e/test_ray_real.py \
	  tests/e2e/test_ray_groups.py tests/e2e/test_second_host.py tests/e2e/test_groups_over_hosts.py \
	  tests/e2e/test_real_fetch.py

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Known vulnerabilities of what the locks name. Without a network it says so and passes.
audit: venv
	@$(BIN)/python requirements/audit.py $(LOCKS) $(DOCS)

docs: $(STAMP)-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

$(STAMP)-docs: $(STAMP) $(DOCS)
	@$(BIN)/python requirements/install.py $(DOCS)
	@touch $@

format: venv
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench-kv: model
	$(BIN)/python -m benchmarks.bench_kv

chaos: model
	$(BIN)/python -m benchmarks.chaos

chaos-real: model
	$(BIN)/python -m benchmarks.chaos --engine real --runs 1000 --turn 3 --minutes 180 --answers 60000 --go-on \
		--out $${CHAOS_OUT:-benchmarks/results/chaos-real}

soak: model
	$(BIN)/python -m benchmarks.chaos.soak

bench-policy: venv
	$(BIN)/python -m benchmarks.bench_policy

bench-peers: model
	$(BIN)/python -m benchmarks.peers

clean:
	rm -rf .venv build .pytest_cache .mypy_cache .ruff_cache *.egg-info
