# One-word commands. `make demo` and `make test` do all their own set-up in .venv.

VENV := .venv
PYTHON ?= python3
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test test-slow coverage lint redis chromium bench docs package clean

demo: $(VENV)/.demo
	$(BIN)/salience demo

test: lint redis chromium
	$(BIN)/python -m pytest -n 3

test-slow: $(VENV)/.dev
	$(BIN)/python -m pytest -m slow

# All tests once more, by a quarter slower: which lines they reach, in the processes they start as well.
coverage: $(VENV)/.dev redis chromium
	$(BIN)/python -m pytest -n 2 --cov --cov-config=.ci/coverage.ini --cov-report=term

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright -p pyproject.toml --level error
	$(BIN)/lint-imports

# A real server for the tests of the Redis tier, where it may be installed; without it they are skipped, loudly.
redis:
	@command -v redis-server >/dev/null || ! command -v apt-get >/dev/null || [ "$$(id -u)" != 0 ] || { \
		echo "Installing redis-server for the tests ..."; export RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive; \
		{ apt-get install -y redis-server || { apt-get update && apt-get install -y redis-server; }; } >/dev/null 2>&1; \
	} || echo "redis-server cannot be installed."

# A real browser for the tests of the HTML report, likewise.
chromium:
	@command -v chromium >/dev/null || ! command -v apt-get >/dev/null || [ "$$(id -u)" != 0 ] || { \
		echo "Installing chromium for the tests ..."; export DEBIAN_FRONTEND=noninteractive; \
		{ apt-get install -y chromium || { apt-get update && apt-get install -y chromium; }; } >/dev/null 2>&1; \
	} || echo "chromium cannot be installed."

bench: $(VENV)/.dev
	$(BIN)/python benchmarks/overhead.py --quick

# The site, in site/; links that lead nowhere are errors.
docs: $(VENV)/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Wheel and sdist, checked as an index would.
package: $(VENV)/.dev
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist .
	$(BIN)/twine check --strict dist/*

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "salience needs Python 3.11 or newer; set PYTHON=python3.11"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { echo "python3-venv is missing; trying to install it"; rm -rf $(VENV); apt-get install -y python3-venv && $(PYTHON) -m venv $(VENV); }

$(VENV)/.demo: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing salience into $(VENV) (the first time takes a few minutes) ..."
	@$(PIP) -e '.[all]'
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing salience and its test tools into $(VENV) (the first time takes a few minutes) ..."
	@$(PIP) -e '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) build dist site .pytest_cache .ruff_cache .coverage* src/*.egg-info
