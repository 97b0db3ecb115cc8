# make demo    install into .venv, train an EAGLE drafter for the bundled target, print its acceptance table
# make test    install, and run the tests (without the slow ones)
# make lint    ruff, mypy and the house rules
# The tests use one thread: their matrices are small, and two threads on two busy cores stall each other.
# PYTHON=python3.11 or VENV=folder choose another interpreter or place.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
TORCH ?= torch==2.13.0

.PHONY: demo test test-slow lint install

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml scripts/install_torch.sh
	$(PYTHON) -m venv $(VENV)
	sh scripts/install_torch.sh $(BIN) $(TORCH)
	$(BIN)/pip install --quiet --editable ".[dev]"
	touch $@

demo: install
	$(BIN)/python train/run.py +drafter=eagle

test: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow" --durations=15

test-slow: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow --durations=5

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
