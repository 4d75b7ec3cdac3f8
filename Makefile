# Two commands do everything: `make demo` and `make test`. Both set up .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# Tests run in parallel processes: threads inside each would only fight over the cores.
PYTEST := OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest -q

.PHONY: demo test test-slow test-gpu lint bench census surrogate papers browser golden clean

demo: $(VENV)/.core
	$(BIN)/locater demo --json demo.json --report demo.html --twin demo-twin.html

test: $(VENV)/.dev lint
	$(PYTEST) -n 2

test-slow: $(VENV)/.dev
	$(PYTEST) -m slow

test-gpu: $(VENV)/.dev
	$(PYTEST) -m gpu

# The page tests skip where there is no Chromium; on Debian and its relatives this installs one.
browser:
	command -v chromium || (apt-get update -qq && apt-get install -y -qq chromium)

lint: $(VENV)/.dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

census: $(VENV)/.dev
	$(BIN)/python scripts/census.py

surrogate: $(VENV)/.dev
	$(BIN)/python scripts/surrogate.py

# Every claim of every paper, as far as minutes on two cores and the kept training runs decide it.
papers: $(VENV)/.dev
	$(BIN)/locater reproduce --quick --runs docs/results/mechanisms-runs.jsonl

# What commands print today becomes what the tests compare with: docs/golden.md says when that is right.
golden: $(VENV)/.dev
	OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python scripts/golden.py

bench: $(VENV)/.bench
	$(BIN)/python benchmarks/checkpoint.py

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "locater needs Python 3.11 or later, this is " + sys.version.split()[0])'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.core: $(BIN)/python pyproject.toml constraints.txt
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e .
	touch $@

$(VENV)/.dev: $(VENV)/.core
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

$(VENV)/.bench: $(VENV)/.dev
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[bench]'
	touch $@

clean:
	rm -rf $(VENV) demo.json demo.html demo-twin.html
