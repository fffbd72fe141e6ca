# Everything runs in .venv, which `make setup` makes: the fork's wheel is built and installed there.
PYTHON ?= python3
PY := .venv/bin/python
REQUIREMENTS := import tomllib; p = tomllib.load(open('pyproject.toml', 'rb')); \
	print(*p['build-system']['requires'], *p['dependency-groups']['dev'])

# The wheel depends on all of these.
SOURCES := pyproject.toml $(shell find fork patches vllm -type f -not -path '*/__pycache__/*')

.PHONY: setup demo test lint drop clean

setup: .venv/installed

.venv/installed: $(SOURCES)
	test -x $(PY) || $(PYTHON) -m venv .venv
	$(PY) -m pip install --quiet --disable-pip-version-check $$($(PYTHON) -c "$(REQUIREMENTS)")
	$(PY) -m fork install
	touch $@

demo: setup
	$(PY) -m benchmarks.live_update

lint: setup
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	$(PY) -m fork lint

test: lint
	$(PY) -m fork status
	$(PY) -m pytest tests/fork
	$(PY) -m fork trial

# Each patch dropped in turn: the tests it names go red.
drop: setup
	$(PY) -m fork trial --drop

clean:
	rm -rf .venv build
