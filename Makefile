# Everything a newcomer needs: `make train` and `make test`. Both set the environment up once.
PYTHON ?= python3
TORCH  ?= torch==2.13.0
VENV   := .venv
BIN    := $(VENV)/bin
ARGS   ?=

.PHONY: train test test-slow faults check format bench clean

train: $(VENV)/.run
	$(BIN)/narrowgauge train $(ARGS)

test: $(VENV)/.dev
	$(BIN)/python -m pytest $(ARGS)

test-slow: $(VENV)/.dev
	$(BIN)/python -m pytest -m slow $(ARGS)

faults: $(VENV)/.dev
	$(BIN)/python -m pytest -m case --fault-table docs/faults.md $(ARGS)

check: $(VENV)/.dev
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

format: $(VENV)/.dev
	$(BIN)/ruff check --fix . && $(BIN)/ruff format .

bench: $(VENV)/.run
	$(BIN)/python benchmarks/emulation.py $(ARGS)

clean:
	rm -rf $(VENV) runs .pytest_cache .mypy_cache .ruff_cache

# A torch >= 2.11 that $(PYTHON) can already import is used as it is; otherwise $(TORCH) is installed.
$(VENV)/.torch:
	@if $(PYTHON) -c "import torch, sys; sys.exit(tuple(map(int, torch.__version__.split('.')[:2])) < (2, 11))" 2>/dev/null; \
	then echo "using the torch that $(PYTHON) already has"; $(PYTHON) -m venv --system-site-packages $(VENV); \
	else $(PYTHON) -m venv $(VENV) && $(BIN)/python -m pip install --quiet $(TORCH); fi
	@touch $@

$(VENV)/.run: $(VENV)/.torch pyproject.toml
	$(BIN)/python -m pip install --quiet --editable .
	@touch $@

$(VENV)/.dev: $(VENV)/.run
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@
