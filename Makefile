# The few commands that a person types. PYTHON= chooses the interpreter; everything runs in .venv,
# which is laid over that interpreter's packages where it already has a fitting torch.
PYTHON ?= python3
PY := .venv/bin/python
AT_ONCE ?= $(shell n=$$(nproc); echo $$((n < 8 ? n + 1 : 8)))

.PHONY: help venv build demo test-unit test test-all nightly lint format sanitize bench compat
.PHONY: faults soak gpu fuzz docs simulate alone clean

help:
	@echo "make demo      train a small model on 2 processes: gloo beside pycomm (draws demo.png)"
	@echo "make test      build, then the quick tests: below six minutes on two processors"
	@echo "make test-unit build, then the tests of one process alone: about a minute"
	@echo "make test-all  build, lint, all tests, with connections of unauthenticated clients"
	@echo "make nightly   each test file alone, long simulations, a fuzz hunt, faults, a soak (hours)"
	@echo "make build     the compiled modules, in place"
	@echo "make lint      format, lint and types       make format    let the formatters rewrite"
	@echo "make sanitize  the native suites under address, undefined and thread sanitizers"
	@echo "make bench     collectives beside gloo      make venv      the environment, .venv"
	@echo "make compat    torch's own suite and other people's programs, on gloo and here (15 minutes)"
	@echo "make faults    fault injection in every call, rank failures, unauthenticated clients (40 minutes)"
	@echo "make soak      anything happens to groups at work, for MINUTES=60"
	@echo "make gpu       everything that wants a GPU, for a machine with one or eight (up to an hour)"
	@echo "make fuzz      any bytes into every parser of bytes from outside (6 minutes, needs clang)"
	@echo "make docs      the pages and the reference of every public name as a site, build/docs"
	@echo "make simulate  rank failures in every order of events, and a million at random (long)"
	@echo "make alone     each test file in a process of its own (for a night)"
	@echo "make clean     what was built (.venv stays)"

venv:
	@command -v $(PYTHON) >/dev/null || { echo "pycomm: $(PYTHON) not found: apt-get install python3-dev python3-venv, or PYTHON=..."; exit 1; }
	@$(PYTHON) tools/environment.py

build: venv
	$(PY) setup.py -q build_ext --inplace
	@$(MAKE) --no-print-directory .venv/installed

# Makes `pycomm` a command of .venv and leaves the entry points that torch looks up.
.venv/installed: pyproject.toml
	$(PY) -m pip install -q --disable-pip-version-check --no-build-isolation --no-deps -e .
	@touch $@

demo: build
	$(PY) -m pycomm demo

# Most tests wait for ranks that wait for each other: one more at a time than there are processors.
PYTEST := $(PY) -m pytest --numprocesses=$(AT_ONCE) --dist=worksteal

test-unit: build
	$(PYTEST) --no-attack -m unit

test: build
	$(PYTEST) --no-attack -m "unit or quick"

# The quick tests, too: here unauthenticated clients connect to their ranks.
test-all: build lint .venv/programs
	$(PYTEST)

nightly: alone simulate fuzz faults soak

lint: venv
	$(PY) tools/lint.py

format: venv
	$(PY) tools/lint.py --fix

# What a file needs must not come from another one that happened to run before it.
alone: build .venv/programs
	$(PY) tools/test_alone.py --jobs $(AT_ONCE)

sanitize: venv
	$(PY) -m pytest tests/test_native.py

bench: build
	$(PY) -m pycomm bench collectives

# Other people's packages, about 1.2 GB, whose programs have to run here unchanged, or which we call.
.venv/programs: pyproject.toml | build
	$(PY) -m pip install -q --disable-pip-version-check --no-build-isolation -e '.[programs]'
	@touch $@

compat: build .venv/programs
	$(PY) tests/compat/table.py --run

faults: build
	$(PY) -m benchmarks faults --json benchmarks/results/faults.json --plot benchmarks/results/faults.png
	$(PY) -m benchmarks rank_failure --json benchmarks/results/rank_failure.json --plot benchmarks/results/rank_failure.png
	$(PY) -m benchmarks connection_flood --json benchmarks/results/connection_flood.json

MINUTES ?= 60
soak: build
	$(PY) -m benchmarks soak --minutes $(MINUTES) --json benchmarks/results/soak.json

gpu: build
	$(PY) -m benchmarks gpu

fuzz: venv
	$(PY) tests/fuzz/hunt.py

# Fails on every warning, as a link without a target or a docstring that cannot be read.
docs: build .venv/docs
	$(PY) -m sphinx -q -E -W --keep-going -b html -d build/doctrees docs build/docs
	@echo "build/docs/index.html"

.venv/docs: pyproject.toml | build
	$(PY) -m pip install -q --disable-pip-version-check --no-build-isolation -e '.[docs]'
	@touch $@

simulate: venv
	bin=$$($(PY) tests/native/build.py plain simulation) && $$bin && $$bin long

clean:
	rm -rf build dist *.egg-info pycomm/*.so
