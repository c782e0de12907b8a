# Every target sets up what it needs and is safe to repeat.
#   make TORCH="torch==2.13.0"     the default: a CPU build on a machine set up for it
#   make TORCH="torch>=2.10"       what PyPI offers (on Linux: CUDA)
PYTHON ?= python3
VENV   ?= .venv
TORCH  ?= torch==2.13.0
JOBS   ?= 2

BIN := $(VENV)/bin
# One stamp per choice of torch, and only the last one: another choice installs anew.
STAMP := $(VENV)/.installed-$(shell printf '%s' '$(TORCH)' | cksum | cut -d' ' -f1)
# Marks a folder that this file made, and may therefore make anew.
OURS := $(VENV)/.made-by-make
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# Each test process gets one thread: $(JOBS) of them share the machine.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS)

.PHONY: install demo test test-deep lint types docs bench bench-gpu bench-gpu-dry roofline package clean bench-dist validate-model inspect inspect-ci inspect-versions

install: $(STAMP)

# Without its stamp a folder of ours is half installed or holds another torch: begin anew. The stamp
# goes before anything is touched and comes back last, so an interruption leaves none.
$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("Piper needs Python 3.11 or later: make PYTHON=python3.12" \
	  if sys.version_info < (3, 11) else 0)'
	@if [ -e $(OURS) ] && [ ! -e $@ ]; then rm -rf $(VENV); fi
	@if [ ! -d $(VENV) ]; then mkdir -p $(VENV) && touch $(OURS); fi
	@rm -f $(VENV)/.installed-*
	$(PYTHON) -m venv $(VENV)
	$(PIP) "$(TORCH)"
	$(PIP) --editable ".[dev]"
	@touch $@

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
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# make bench OUT=bench/results keeps what it measured.
bench: $(STAMP)
	$(BIN)/python -m bench.bench_moe --quick $(if $(OUT),--out $(OUT))

# On a machine with a GPU, with the python3 that holds its torch: nothing is installed. SECONDS=900
# gives it more time, OUT=bench/results keeps what it measured.
bench-gpu:
	$(PYTHON) -m bench.gpu $(if $(SECONDS),--seconds $(SECONDS)) $(if $(OUT),--out $(OUT))

bench-gpu-dry: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m bench.gpu --dry-run

# make roofline OUT=bench/results writes the table that docs/kernels.md shows.
roofline: $(STAMP)
	$(BIN)/python -m bench.roofline $(if $(OUT),--out $(OUT))

# Emulated nodes: needs root and iproute2, and says so without.
bench-dist: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m bench.bench_exchange $(if $(OUT),--out $(OUT))

# The planner's model against real tensors and published numbers; the last line counts targets.
validate-model: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m bench.validate_model

# Every kernel, shipped tile and dtype, compiled for every GPU: half an hour the first time.
inspect: $(STAMP)
	$(BIN)/piper inspect --matrix full --check --quiet --jobs $(JOBS)
inspect-ci: $(STAMP)
	$(BIN)/piper inspect --matrix ci --check --quiet --jobs $(JOBS)
# The same as inspect-ci under every supported Triton.
inspect-versions: $(STAMP)
	bash .ci/inspect-versions "$(BIN)" "$(VENV)" $(JOBS)
package: $(STAMP)
	bash .ci/package "$(BIN)"

clean:
	rm -rf $(VENV) build dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis
