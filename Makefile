# Each target sets up what it needs in .venv. PYTHON: 3.11 to 3.13; TORCH: 2.9 to 2.13.
PYTHON ?= python3
TORCH ?= torch==2.13.0
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: demo test lint types clean

demo: .venv/demo
	$(BIN)/hal demo

test: lint types
	HAL_EVIDENCE=build/cpu.json $(BIN)/python -m pytest -n 2 --dist worksteal
	$(BIN)/python ci/gate.py cpu build/cpu.json

lint: .venv/test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/test
	$(BIN)/mypy

.venv/demo: pyproject.toml
	$(PYTHON) -m venv .venv
	$(PIP) "$(TORCH)"
	$(PIP) -e ".[torch]"
	touch $@

.venv/test: .venv/demo
	$(PIP) -e ".[torch,test]"
	touch $@

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache
