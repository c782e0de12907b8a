# Every target sets up what it needs and is safe to repeat.
#   make TORCH="torch==2.13.0"     the default: a CPU build on a machine set up for it
#   make TORCH="torch>=2.10"       what PyPI offers (on Linux: CUDA)
PYTHON ?= python3
VENV   ?= .venv
TORCH  ?= torch==2.13.0
JOBS   ?= 2

BIN := $(VENV)/bin
# One stamp per choice of torch: another choice installs again, an interrupted install leaves none.
STAMP := $(VENV)/.installed-$(shell printf '%s' '$(TORCH)' | cksum | cut -d' ' -f1)
# Each test process gets one thread: $(JOBS) of them share the machine.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS)

.PHONY: install demo test test-deep lint types docs package clean

install: $(STAMP)

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[dev]"
	touch $@

demo: $(STAMP)
	$(BIN)/piper train --out runs/demo --overwrite

test: $(STAMP)
	$(PYTEST)

test-deep: $(STAMP)
	HYPOTHESIS_PROFILE=deep $(PYTEST) -m "slow or not slow" tests

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

docs: $(STAMP)
	$(BIN)/mkdocs build --strict

package: $(STAMP)
	bash .ci/package "$(BIN)"

clean:
	rm -rf $(VENV) build dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis
