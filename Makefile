# Everything a newcomer needs: `make train` and `make test`. Both set the environment up once.
PYTHON ?= python3
TORCH  ?= torch==2.13.0
VENV   := .venv
BIN    := $(VENV)/bin
ARGS   ?=
# With this variable set, each worker and each process that it starts would compile all modules and tests again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: train test test-thorough nightly proofs mutants pages faults check format gpu bench tables evidence ladder2 forecasts docs wheel conformance versions lock
.PHONY: notebook notebook-kept workflows clean

train: $(VENV)/.run
	$(BIN)/narrowgauge train $(ARGS)
	@echo "the command: $(BIN)/narrowgauge, or narrowgauge after '. $(BIN)/activate'"

test: $(VENV)/.dev
	$(BIN)/python -m pytest -n 2 --dist worksteal $(ARGS)

test-thorough: $(VENV)/.dev
	$(BIN)/python -m pytest -n 2 --dist worksteal -m thorough $(ARGS)

# What no commit waits for: all recipes and targets, every row of the table of faults, and kernels executed as PTX.
nightly: $(VENV)/.dev
	$(BIN)/python -m pytest -n 2 --dist worksteal -m nightly $(ARGS)
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "" tools $(ARGS)

# Proofs of minutes, where a file that they prove has changed; --all runs each of them.
proofs: $(VENV)/.dev
	$(BIN)/python release/proofs.py $(ARGS)

# Planted faults: which test of the quick tier finds each; `make mutants ARGS="--only formats"`.
mutants: $(VENV)/.dev
	$(BIN)/python tools/mutants.py $(ARGS)

# The tables of plans that pages show, made again by their commands; with another torch in an environment of its own:
# make pages VENV=.venv-next TORCH=torch==2.14.1 PYTHON=...
pages: $(VENV)/.dev
	$(BIN)/python -m pytest -n 2 -m '' tests/test_plan_pages.py $(ARGS)

faults: $(VENV)/.dev
	$(BIN)/python -m pytest -m case --fault-table=docs/faults.md -n 2 --dist worksteal $(ARGS)

check: $(VENV)/.dev
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy
	$(BIN)/python -m pytest -q -s -p no:xdist -m '' tests/test_house.py

format: $(VENV)/.dev
	$(BIN)/ruff check --fix . && $(BIN)/ruff format .

# What a new machine has to get right: each case in a process that another's crash does not reach. It writes gpu.xml
# and gpu.md, the page to send. Without a GPU, kernels run in Triton's interpreter: `make gpu ARGS="-k losses"`.
gpu: $(VENV)/.dev
	-$(BIN)/python -m pytest -m '' -n 1 --max-worker-restart=1000 -p no:support.cost -W default --tb=short --junitxml=gpu.xml tests/gpu $(ARGS)
	$(BIN)/python tests/gpu/page.py gpu.xml gpu.md

bench: $(VENV)/.run
	$(BIN)/python benchmarks/emulation.py $(ARGS)

# Files made from the shipped recipes and casts.
tables: $(VENV)/.dev
	$(BIN)/python tests/golden/make.py resolved page
	$(BIN)/python conformance/make.py

# Ladder 1 in docs/evidence.md and its picture, made again from docs/evidence/runs.csv: the same digits, in a second.
evidence: $(VENV)/.run
	$(BIN)/python experiments/evidence.py $(ARGS)

# Ladder 2 and the registered forecasts in docs/evidence.md, made again from the rows in docs/evidence.
ladder2: $(VENV)/.run
	$(BIN)/python experiments/ladder2_page.py
	$(BIN)/python experiments/forecasts.py --scores

# The tables of docs/forecast.md and docs/evidence.md, made again from the atlas: a quarter of an hour.
forecasts: $(VENV)/.run
	$(BIN)/python experiments/forecasts.py $(ARGS)

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict $(ARGS)

# Runs the tutorial from the first cell to the last, in a folder of its own: two minutes. `make notebook-kept` keeps its outputs.
NOTEBOOK := docs/which-format.ipynb
notebook: $(VENV)/.docs
	rm -rf runs/notebook && mkdir -p runs/notebook && cp $(NOTEBOOK) runs/notebook/
	cd runs/notebook && PATH="$(CURDIR)/$(BIN):$$PATH" python -m nbconvert --to notebook --execute --inplace $(ARGS) *.ipynb

notebook-kept: notebook
	$(BIN)/python -m nbconvert --to notebook --inplace --CoalesceStreamsPreprocessor.enabled=True runs/notebook/*.ipynb
	cp runs/notebook/*.ipynb $(NOTEBOOK)

# The sdist and the wheel in dist/, used as a user would in a clean environment: two minutes.
wheel: $(VENV)/.dev
	$(BIN)/python release/check.py --torch $(TORCH) $(ARGS)

# The vectors for other libraries, against those that are installed.
conformance: $(VENV)/.dev
	$(BIN)/python -m pytest -n 2 tests/test_conformance.py tests/test_conformance_runner.py tests/test_conformance_matrix.py tests/formats $(ARGS)

# docs/versions.md: the plugs against the trainers that are installed in $(VENV).
versions: $(VENV)/.dev
	$(BIN)/python release/versions.py test $(ARGS)

# The versions that a release was tested with, with hashes; needs uv.
lock:
	printf '$(TORCH)' | uv pip compile pyproject.toml - --universal --python-version 3.11 --generate-hashes --no-header \
	  --no-annotate --output-file release/requirements.txt $(ARGS)

# Each step of the workflows of GitHub, here: `make workflows ARGS="--only checks"`.
workflows: $(VENV)/.dev
	$(BIN)/python release/workflows.py $(ARGS)

clean:
	rm -rf $(VENV) runs site .pytest_cache .mypy_cache .ruff_cache

# A torch >= 2.11 that $(PYTHON) can already import is used as it is; otherwise $(TORCH) is installed.
$(VENV)/.torch:
	@if $(PYTHON) -c "import torch, sys; sys.exit(tuple(map(int, torch.__version__.split('.')[:2])) < (2, 11))" 2>/dev/null; \
	then echo "using the torch that $(PYTHON) already has"; $(PYTHON) -m venv --system-site-packages $(VENV); \
	else echo "installing $(TORCH) in $(VENV), once (5 GB on disk; minutes)"; $(PYTHON) -m venv $(VENV) && $(BIN)/python -m pip install $(TORCH); fi
	@touch $@

$(VENV)/.run: $(VENV)/.torch pyproject.toml
	@echo "installing narrowgauge and its dependencies in $(VENV)"
	$(BIN)/python -m pip install --quiet --editable .
	@touch $@

# With the torch that is there: an extra that needs another one is an error, and no silent exchange.
$(VENV)/.dev: $(VENV)/.run
	$(BIN)/python -m pip install --quiet --editable '.[dev]' \
	  $$($(BIN)/python -c "import importlib.metadata as m; print('torch==' + m.version('torch').partition('+')[0])")
	@touch $@

$(VENV)/.docs: $(VENV)/.run
	$(BIN)/python -m pip install --quiet --editable '.[docs]'
	@touch $@
