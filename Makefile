# Everything runs in .venv, which `make setup` makes: the fork's wheel is built and installed there.
PYTHON ?= python3
PY := .venv/bin/python
# `$(call requirements,GROUP)` prints what pyproject.toml lists there.
requirements = $$($(PYTHON) -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb')); \
	print(*(p['build-system'] | p['dependency-groups'])['$(1)'])")
# Named after what chooses the wheel, so that another choice is another target.
INSTALLED := .venv/installed-$(VLLM_FORK_BASE)-$(VLLM_TARGET_DEVICE)
PIP_INSTALL := $(PY) -m pip install --quiet --disable-pip-version-check

# The wheel depends on all of these.
SOURCES := pyproject.toml $(shell find fork patches vllm -type f -not -path '*/__pycache__/*')

.PHONY: setup demo test lint drop graph-ab audit clean

setup: $(INSTALLED)

# An environment of another choice goes, once the new wheel is built: a torch for CPUs would satisfy a CUDA wheel too.
$(INSTALLED): $(SOURCES)
	@$(PYTHON) -c 'import tomllib' 2>/dev/null || \
		{ echo "$(PYTHON) is no Python 3.11 or later; name one: make setup PYTHON=..." >&2; exit 1; }
	$(if $(filter-out $@,$(wildcard .venv/installed*)),$(PY) -m fork build && rm -rf .venv)
	test -x $(PY) || $(PYTHON) -m venv .venv
	$(PIP_INSTALL) $(call requirements,requires)
	$(PIP_INSTALL) $(call requirements,dev)
	$(PY) -m fork install
	$(PIP_INSTALL) --no-deps $(call requirements,flashinfer)
	touch $@

demo: setup
	$(PY) -m benchmarks.live_update

# What is for upstream has upstream's 88 columns.
UPSTREAM := vllm tests/model_executor tests/models tests/v1

lint: setup
	.venv/bin/ruff check .
	.venv/bin/ruff check --line-length 88 $(UPSTREAM)
	.venv/bin/ruff format --check fork benchmarks tests/fork tests/gpu
	.venv/bin/ruff format --check --line-length 88 $(UPSTREAM)
	.venv/bin/mypy
	$(PY) -m fork lint

test: lint
	$(PY) -m fork status
	$(PY) -m pytest -n 2 --dist loadfile tests/fork tests/gpu
	$(PY) -m fork trial

# Each patch dropped in turn: the tests it names go red.
drop: setup
	$(PY) -m fork trial --drop

# What a graph serves after an update, with the faults put back and without; tests/gpu asserts the same on a GPU.
graph-ab: setup
	$(PY) -m benchmarks.graph_ab

# Every text-generation architecture, in every mode; also as JSON and as a page below build/.
audit: setup
	mkdir -p build
	.venv/bin/vllm reload-audit --all --group text-generation --mode same update back repeat poisoned \
		--json build/audit.json --html build/audit.html

clean:
	rm -rf .venv build
