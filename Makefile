# make demo    install into .venv, train an EAGLE drafter for the bundled target, print its acceptance table
# make test    install, and run the tests (without the slow ones)
# make lint    ruff, mypy and the house rules
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
	$(BIN)/python -m pytest -m "not slow"

test-slow: install
	$(BIN)/python -m pytest -m slow

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
