# `make demo` shows the product on data that it makes; `make test` checks it. Both set up what they need, once.
SHELL := /bin/bash
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= $(firstword $(foreach v,3.11 3.12 3.13,$(shell command -v python$(v))) python3)
BIN := .venv/bin
STAMP := .venv/.installed-$(firstword $(shell sha256sum requirements.lock))
CACHE := .data
SIGNS := $(CACHE)/sign_digits
# The folder of your copy of the Sign Language Digits Dataset; git fetches one if it is not there.
PHOTOGRAPHS ?= $(SIGNS)/checkout
export PYTHONPATH :=
# Some containers set this; every process would then compile torch and all other modules again.
export PYTHONDONTWRITEBYTECODE :=
export UV_HTTP_TIMEOUT ?= 300

.PHONY: help setup demo photographs test test-long test-gpu docs lint format lock clean

help:  ## what there is
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(STAMP)  ## install everything into .venv (no GPU needed)

$(STAMP): requirements.lock
	@[ "$$(uname -s)-$$(uname -m)" = Linux-x86_64 ] || { echo "This is $$(uname -s) on $$(uname -m), and \
	requirements.lock is for Linux on x86-64: use WSL2 on Windows, or a Linux machine elsewhere (docs/commands.md)."; exit 2; }
	@"$(PYTHON)" -c 'import sys; v = sys.version_info[:2]; sys.exit(not (3, 11) <= v <= (3, 13))' 2>/dev/null || { \
	echo "$(PYTHON) is $$("$(PYTHON)" -V 2>&1), and Python 3.11, 3.12 or 3.13 is needed: \
	install one, or name it with 'make PYTHON=/path/to/python3.11'."; exit 2; }
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || { echo "$(PYTHON) has no venv: \
	install it with 'apt-get install python3-venv'."; exit 2; }
	@echo "Setting up .venv: about 3.5 GB to download, once."
	@rm -f .venv/.installed-*
	@[ -x $(BIN)/python ] || "$(PYTHON)" -m venv .venv
	@$(BIN)/pip install --quiet --disable-pip-version-check "$$(grep -oE '^uv==[^ ]+' requirements.lock)"
	@$(BIN)/uv pip sync --quiet --python $(BIN)/python --require-hashes requirements.lock
	@touch $@

demo: $(STAMP)  ## make data, pre-train, fine-tune, evaluate, predict; ends with report.html (minutes, no GPU needed)
	$(BIN)/python cli.py make-data $(CACHE)/hands --poses 800 --seed 0
	$(BIN)/python cli.py pretrain -c configs/demo.toml --resume auto
	$(BIN)/python cli.py finetune -c configs/finetune_demo.toml --from random --out runs/from_scratch --resume auto
	$(BIN)/python cli.py finetune -c configs/finetune_demo.toml --resume auto
	$(BIN)/python cli.py evaluate runs/from_pretrained --compare runs/from_scratch --set data.part=evaluation \
	    --set data.split=all
	mkdir -p runs/ten_hands && cp $(CACHE)/hands/evaluation/rgb/0000000?.jpg runs/ten_hands
	head -11 $(CACHE)/hands/evaluation_boxes.csv > runs/ten_hands/boxes.csv
	$(BIN)/python cli.py predict networks/hand_photos_rn18.safetensors runs/ten_hands --box runs/ten_hands/boxes.csv \
	    --out runs/predictions_demo
	$(BIN)/python cli.py report runs/demo runs/from_pretrained runs/from_scratch --predictions runs/predictions_demo \
	    --title "100 labelled images: from the encoder pre-trained above, and from scratch" --out runs/report.html

photographs: $(STAMP) $(SIGNS)/images  ## pre-train on photographs of hands, and tell digits apart by its features
	$(BIN)/uv run tools/find_boxes.py $(SIGNS)/images $(SIGNS)/boxes.csv
	$(BIN)/python tools/sign_digits.py $(SIGNS)
	$(BIN)/python cli.py pretrain -c configs/photographs.toml --resume auto
	$(BIN)/python -m examples.digits runs/photographs networks/hand_photos_rn18.safetensors
	$(BIN)/python cli.py report runs/photographs --title "Pre-training on photographs of hands" --out runs/photographs.html

$(SIGNS)/images:
	[ -d "$(PHOTOGRAPHS)/Dataset" ] || git clone --quiet --depth 1 \
	    https://github.com/ardamavi/Sign-Language-Digits-Dataset "$(PHOTOGRAPHS)"
	mkdir -p $(SIGNS) && ln -sfn "$$(realpath "$(PHOTOGRAPHS)")/Dataset" $@

test: lint  ## lint, types and the tests that end within minutes, on the CPU
	CUDA_VISIBLE_DEVICES= $(BIN)/pytest -q -n 4 --dist loadfile --no-loadscope-reorder -m "not slow"

test-long: $(STAMP)  ## the slower proofs, about an hour on two cores; with RECORD=1 their rows go to bench/results/
	CUDA_VISIBLE_DEVICES= $(BIN)/pytest -q -m slow --durations=0 $(if $(RECORD),--record)

test-gpu: $(STAMP)  ## the tests that need a CUDA device
	$(BIN)/pytest -q -m gpu

docs: $(STAMP)  ## the pages of docs/ and the API as a site, in site/
	$(BIN)/mkdocs build --quiet
	cp -r --parents examples networks/README.md CITATION.cff CONTRIBUTING.md site/

lint: $(STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format: $(STAMP)  ## let ruff mend what it can
	@$(BIN)/ruff check --fix . ; $(BIN)/ruff format .

lock: $(STAMP)  ## resolve pyproject.toml into requirements.lock, with hashes and without index addresses
	$(BIN)/uv pip compile pyproject.toml --all-extras --group dev --universal --python-version 3.11 --fork-strategy fewest \
	--generate-hashes --no-emit-index-url --no-annotate --no-header --quiet -o requirements.lock

clean:  ## remove what was generated; the environment stays
	rm -rf $(CACHE) runs site .pytest_cache .mypy_cache .ruff_cache .hypothesis
