# Two commands do everything on a fresh machine with Python 3.11 or newer and make: `make demo` and `make test`.
PYTHON ?= $(shell command -v python3.11 || echo python3)
VENV := .venv
BIN := $(VENV)/bin

# Compiled modules are kept: each worker of the tests, and each program that they execute, compiled all of them anew.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: setup lock demo test quick test-long test-system gpu-wheels test-gpu bench bench-gpu simulate exhaust soak fuzz mutants check format generated docs clean

setup: $(VENV)/.installed

# Only what is in the lock, with its hashes. pip installs uv, which is much quicker, and torch, of which it takes the CPU
# build where it finds one. The other build needs the CUDA libraries, some 3 GB, which are not in the lock: torch itself
# says which versions. Only what is imported is compiled, a twelfth of all: here what every program and test needs, once,
# before several processes would compile it at the same time; the rest where it is used.
LOCKED := install -q --disable-pip-version-check --no-compile --no-deps --require-hashes -r

$(VENV)/.installed: pyproject.toml requirements.lock
	$(PYTHON) -m venv $(VENV)
	$(PYTHON) docker/requirements.py --only uv > $(VENV)/uv.txt
	$(PYTHON) docker/requirements.py --only torch > $(VENV)/torch.txt
	sed -n 's/^# torch/torch/p' requirements.lock > $(VENV)/torch-cpu.txt
	$(BIN)/pip $(LOCKED) $(VENV)/uv.txt
	$(BIN)/pip $(LOCKED) $(VENV)/torch-cpu.txt 2>/dev/null || { $(BIN)/pip $(LOCKED) $(VENV)/torch.txt && \
	$(BIN)/pip install -q --disable-pip-version-check --no-compile "$$(sed -n 's/^\(torch==[^ ]*\).*/\1/p' $(VENV)/torch.txt)"; }
	$(BIN)/uv pip install -q --python $(BIN)/python --no-deps --require-hashes -r requirements.lock
	$(BIN)/uv pip install -q --python $(BIN)/python --no-deps --no-build-isolation -e .
	$(BIN)/uv pip check -q --python $(BIN)/python
	PYTHONPATH=tests $(BIN)/python -c "from support.fork_server import import_all; import_all()"
	@touch $@

lock: setup
	$(BIN)/python tools/lock.py $(UPGRADE)

demo: setup
	$(BIN)/elche run examples/digits.py --ranks 2 --slow 1=2.3

# Workers take whole files, so that a file's processes are shared; those marked `slow` first.
BY_FILE := --dist loadfile --no-loadscope-reorder
SYSTEM_WORKERS ?= 2

# What failed is run again, alone, when all others have ended: what fails twice fails; what passes then is printed as
# unstable, to be mended next. A test of real processes cannot always tell a busy machine from a fault.
AGAIN = { echo "run again, alone: what passes now is unstable"; $(1) --last-failed --last-failed-no-failures none -n 0 -v; }
UNITS := -o cache_dir=.pytest_cache/units
SYSTEMS := -o cache_dir=.pytest_cache/systems

# Three at a time keep two processors busy: tests of real processes wait now and then.
UNIT_WORKERS ?= 3

test: setup
	$(BIN)/pytest $(UNITS) -n $(UNIT_WORKERS) $(BY_FILE) tests || $(call AGAIN,$(BIN)/pytest $(UNITS) tests)

# The tests of one program, in less than a minute, for whoever is working on it: `make quick ROOM=core`.
ROOMS := core coordinator client worker
ROOM_core := tests/arithmetic tests/core
ROOM_coordinator := tests/coordinator
ROOM_client := tests/client
ROOM_worker := tests/worker

quick: setup
	@test -n "$(filter $(ROOM),$(ROOMS))" || { echo "make quick ROOM=core, or one of: $(ROOMS)" >&2; exit 2; }
	$(BIN)/ruff check .
	$(BIN)/pytest -n 2 $(ROOM_$(ROOM))

# What takes long and what needs more than Python: beside `make test` in the gate.
GATE := -m "(system or gate) and not long" tests/system tests/processes

# What the tests marked `system` run against, as COMMAND:PACKAGE of Debian. Needs root to install what is missing.
SYSTEM := bwrap:bubblewrap promtool:prometheus psql:postgresql ip:iproute2 chromium:chromium node:nodejs npm:npm slurmctld:slurm-wlm \
	munged:munge sshd:openssh-server wg:wireguard-tools wireguard-go:wireguard-go

test-system: setup
	PATH=$$PATH:/usr/sbin; missing=$$(for pair in $(SYSTEM); do command -v $${pair%:*} >/dev/null || echo $${pair#*:}; done); \
	test -z "$$missing" || (apt-get update -q && apt-get install -q -y --no-install-recommends fonts-dejavu-core $$missing)
	$(BIN)/pytest $(SYSTEMS) -n $(SYSTEM_WORKERS) $(BY_FILE) $(GATE) || $(call AGAIN,$(BIN)/pytest $(SYSTEMS) $(GATE))

# Further cases of what the gate runs one case of, and measurements.
test-long: setup
	$(BIN)/pytest -n 2 $(BY_FILE) -m long tests

# Random jobs in the simulator, in which ranks die and hang and the coordinator ends. `make simulate SEEDS=2000`
SEEDS ?= 200
simulate: setup
	$(BIN)/python tools/simulate.py --seeds $(SEEDS)

# Everything that can happen to small jobs, in any order, with faults at any moment: at most so many states of each case.
# `make exhaust STATES=1000000 EXHAUST="two ranks.*kill"` for some cases as far as they go.
STATES ?= 20000
EXHAUST ?=
exhaust: setup
	$(BIN)/python tools/exhaust.py --states $(STATES) --only '$(EXHAUST)'

# Kills ranks, agents and the coordinator under real jobs until so many kills have hit; each job must be proven.
KILLS ?= 1000
soak: setup
	$(BIN)/python tools/soak.py --kills $(KILLS)

# Changed messages and files for each decoder (tests/fuzz), guided by coverage, until one finds a fault (docs/fuzzing.md).
MINUTES ?= 60
fuzz: setup
	$(BIN)/python tools/fuzz.py --minutes $(MINUTES) --only '$(ONLY)'

# Breaks the code on purpose, one line at a time: a test must notice (tests/mutants). `make mutants ONLY=ledger` for some.
mutants: setup
	$(BIN)/python tools/mutants.py --only '$(ONLY)'

# What a machine with a GPU lacks, if it has Python and torch with CUDA: `make gpu-wheels GPU_PYTHON_VERSION=3.12`
GPU_PYTHON_VERSION ?= 3.11
GPU_WHEELS := gpu-wheels

gpu-wheels: setup
	$(BIN)/python tools/gpu_wheels.py --python $(GPU_PYTHON_VERSION) --folder $(GPU_WHEELS)

# On that machine, in this folder: the wheels are unpacked where there is no virtual environment, and nothing is fetched.
# Four tests at a time share the GPU. Processes are executed: CUDA cannot be used in one that is forked of another.
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,python3)
GPU_PACKAGES := .gpu-packages
UNPACKED := $(if $(wildcard $(BIN)/python),,$(if $(wildcard $(GPU_WHEELS)/*.whl),$(GPU_PACKAGES)/.unpacked))
OURS := $(CURDIR)/proto:$(CURDIR)/coordinator:$(CURDIR)/worker:$(CURDIR)/client
ON_GPU := PYTHONPATH=$(OURS):$(if $(UNPACKED),$(CURDIR)/$(GPU_PACKAGES):)$$PYTHONPATH $(GPU_PYTHON)

$(GPU_PACKAGES)/.unpacked: $(wildcard $(GPU_WHEELS)/*.whl)
	rm -rf $(GPU_PACKAGES) && mkdir $(GPU_PACKAGES)
	for wheel in $(GPU_WHEELS)/*.whl; do $(GPU_PYTHON) -m zipfile -e $$wheel $(GPU_PACKAGES) || exit 1; done
	@touch $@

test-gpu: $(UNPACKED)
	TEST_EXECUTES=1 $(ON_GPU) -m pytest -m gpu $$($(ON_GPU) -c 'import xdist; print("-n 4")' 2>/dev/null) tests/gpu

# Every figure of docs/benchmarks.md: hours, on a machine that does nothing else. BENCH="--only own_loop" runs some of it.
bench: setup
	$(BIN)/python tools/bench.py $(BENCH)

bench-gpu: $(UNPACKED)
	$(ON_GPU) benchmarks/gpu.py $(BENCH)

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/buf lint
	$(BIN)/python tools/protos.py --check
	$(BIN)/python tools/diagram.py --check
	$(BIN)/python tools/settings.py --check
	$(BIN)/python tools/commands_page.py --check
	$(BIN)/python tools/throughput.py --check
	$(BIN)/python tools/dashboards --check
	$(BIN)/python tools/alerts.py --check
	$(BIN)/python tools/chart.py --check

# Draws the diagrams of the site, where there is npm.
MERMAID := @mermaid-js/tiny@11.17.2
docs/mermaid.tiny.js:
	if command -v npm >/dev/null; then npm pack --silent $(MERMAID) && tar xzOf mermaid-js-tiny-*.tgz package/dist/mermaid.tiny.js > $@; rm -f mermaid-js-tiny-*.tgz; fi

docs: setup docs/mermaid.tiny.js
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo "site/index.html"

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

generated: setup
	$(BIN)/python tools/protos.py
	$(BIN)/python tools/diagram.py
	$(BIN)/python tools/settings.py
	$(BIN)/python tools/commands_page.py
	$(BIN)/python tools/throughput.py
	$(BIN)/python tools/dashboards
	$(BIN)/python tools/alerts.py
	$(BIN)/python tools/chart.py

clean:
	rm -rf $(VENV) $(GPU_WHEELS) $(GPU_PACKAGES) runs .pytest_cache .mypy_cache .ruff_cache .hypothesis
