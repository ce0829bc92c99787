# pdkv: every target makes the virtual environment itself when it is missing or older than what it depends on.
#   make demo   serve a real model through a prefill and a decode instance, and watch the KV memory (after set-up: < 90 s)
#   make test   the whole test suite, no network
#   make faults P/D systems under seeded faults (SEEDS=0:10000 is the long proof)
#   make proof  10,000 random lives of blocks under the memory core's invariants (half a minute)
#   make check  lint, types, import floors, fast tests
#   make serve  the OpenAI server on http://127.0.0.1:8000   (MODEL=..., ARGS='--max-model-len 4096')
#   make bench  speed, beside vLLM when PEER_PYTHON names an interpreter that has it
#   make bench-transfer  GB/s and added latency of KV transfers, beside memcpy (half a minute)
#   make setup  only the environment;  make clean  removes it
VENV  := .venv
PY    := $(VENV)/bin/python
READY := $(VENV)/.ready
MODEL ?= smollm2
PORT  ?= 8000
ARGS  ?=
PEER_PYTHON ?=
SEEDS ?= 0:300

FAST_TESTS := tests/core tests/layout tests/models tests/logs tests/plan tests/explain tests/cli

.DEFAULT_GOAL := help
.PHONY: help setup demo serve test faults proof check bench bench-transfer format clean

help:
	@sed -n 's/^#   //p' Makefile

$(READY): pyproject.toml scripts/setup.sh
	@bash scripts/setup.sh $(VENV)
	@touch $@

setup: $(READY)

demo: $(READY)
	@$(PY) -m pdkv demo $(ARGS)

serve: $(READY)
	@$(PY) -m pdkv serve $(MODEL) --port $(PORT) $(ARGS)

test: $(READY)
	@$(PY) -m pytest -n 4 --dist loadfile $(ARGS)

faults: $(READY)
	@$(PY) -m pdkv faults --seeds $(SEEDS) $(ARGS)

proof: $(READY)
	@$(PY) tests/core/block_lives.py 10000 0

check: $(READY)
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/mypy
	@$(VENV)/bin/lint-imports
	@$(PY) -m pytest -q -m "not slow and not gpu" $(FAST_TESTS)

bench: $(READY)
	@$(PY) benchmarks/serve.py $(if $(PEER_PYTHON),--peer-python $(PEER_PYTHON)) $(ARGS)

bench-transfer: $(READY)
	@$(PY) benchmarks/transfer.py $(ARGS)

format: $(READY)
	@$(VENV)/bin/ruff check --fix .
	@$(VENV)/bin/ruff format .

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache build dist
