# Two commands do everything on a fresh machine: `make demo` and `make test`.
# `make soak`: the tests under real faults, and those that search, twenty times as long.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: demo test soak lint bench clean

$(READY): pyproject.toml constraints-dev.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --upgrade pip
	# torch first and pinned: an unpinned one may bring gigabytes of CUDA.
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints-dev.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints-dev.txt -e '.[dev]'
	touch $@

demo: $(READY)
	$(BIN)/python examples/demo.py

test: $(READY) lint
	$(BIN)/python -m pytest -q

soak: $(READY)
	DILOCO_SOAK=$${DILOCO_SOAK:-20} $(BIN)/python -m pytest -rP --timeout=7200 tests/faults \
	    tests/core/test_chaos.py tests/core/test_seeds.py tests/fuzz tests/attacks

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(READY)
	$(BIN)/python tests/benchmarks/run.py
	$(BIN)/python -m tests.benchmarks.bad_line

clean:
	rm -rf $(VENV) demo build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
