# Set-up is done once; a target runs it again only when pyproject.toml or constraints/ changed.
VENV ?= .venv
PYTHON ?= python3.11
export OMP_NUM_THREADS ?= 1

BIN := $(VENV)/bin
READY := $(VENV)/.ready
CONSTRAINTS := constraints/cpu.txt

.PHONY: setup pretrain test lint clean

setup: $(READY)

# torch comes first and by its version: left to the resolver, a CUDA build of gigabytes is taken.
$(READY): pyproject.toml $(CONSTRAINTS)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --disable-pip-version-check -q -c $(CONSTRAINTS) torch==2.13.0
	$(BIN)/pip install --disable-pip-version-check -q -c $(CONSTRAINTS) -e '.[cpu,test,lint]'
	touch $@

pretrain: setup
	$(BIN)/uneven-tp demo

test: setup
	$(BIN)/python -m pytest

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
