# make demo    install into .venv, train an EAGLE drafter for the bundled target, print its acceptance table
# make test    install, and run the tests (without the slow ones)
# make lint    ruff, mypy and the house rules
# make bench   time the engine on SmolLM2 beside transformers' generate, plain, with a draft model and with look-up
# The tests use two processes of one thread: their matrices are small, and threads on busy cores stall each other.
# PYTHON=python3.11 or VENV=folder choose another interpreter or place.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
TORCH ?= torch==2.13.0

.PHONY: demo test test-slow lint bench install

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml scripts/install_torch.sh
	$(PYTHON) -m venv $(VENV)
	sh scripts/install_torch.sh $(BIN) $(TORCH)
	$(BIN)/pip install --quiet --editable ".[dev]"
	touch $@

demo: install
	$(BIN)/python train/run.py +drafter=eagle

test: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "not slow" --durations=15

test-slow: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow --durations=5

BENCH := outputs/bench
bench: install
	$(BIN)/python eval/first_layers.py smollm2 4 $(BENCH)/first-layers
	$(BIN)/python train/run.py +drafter=draft_lm drafter.model.name_or_path=$(BENCH)/first-layers target=smollm2 \
		data=file data.source.path=data/builtin.jsonl data.sizes.test=8 run_name=bench/draft_lm measure.num_prompts=1 measure.temperatures=[0]
	$(BIN)/python train/run.py +drafter=prompt_lookup target=smollm2 \
		data=file data.source.path=data/builtin.jsonl data.sizes.test=8 run_name=bench/prompt_lookup measure.num_prompts=1 measure.temperatures=[0]
	$(BIN)/python eval/speed.py target.source=smollm2 prompts=builtin num_prompts=20 output=$(BENCH) \
		export=[$(BENCH)/draft_lm/export,$(BENCH)/prompt_lookup/export]

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
