# Everything runs in .venv, which `make setup` makes: the fork's wheel is built and installed there.
PYTHON ?= python3
PY := .venv/bin/python
# `$(call requirements,GROUP)` prints what pyproject.toml lists there.
requirements = $$($(PYTHON) -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb')); \
	print(*(p['build-system'] | p['dependency-groups'])['$(1)'])")
PIP_INSTALL := $(PY) -m pip install --quiet --disable-pip-version-check

# The wheel depends on all of these.
SOURCES := pyproject.toml $(shell find fork patches vllm -type f -not -path '*/__pycache__/*')

.PHONY: setup demo test lint drop clean

setup: .venv/installed

.venv/installed: $(SOURCES)
	test -x $(PY) || $(PYTHON) -m venv .venv
	$(PIP_INSTALL) $(call requirements,requires)
	$(PIP_INSTALL) $(call requirements,dev)
	$(PY) -m fork install
	$(PIP_INSTALL) --no-deps $(call requirements,flashinfer)
	touch $@

demo: setup
	$(PY) -m benchmarks.live_update

lint: setup
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	$(PY) -m fork lint
	$(PY) -m fork docs --check

test: lint
	$(PY) -m fork status
	$(PY) -m pytest tests/fork
	$(PY) -m fork trial

# Each patch dropped in turn: the tests it names go red.
drop: setup
	$(PY) -m fork trial --drop

clean:
	rm -rf .venv build
