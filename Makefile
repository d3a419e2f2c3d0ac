# `make` alone lists what it can do.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Tests wait for about a third of their time, so three workers keep two cores busy.
WORKERS ?= 3
RUN_TESTS = $(BIN)/python scripts/run_tests.py --workers $(WORKERS) $(if $(AGAIN),--again) $(if $(TIMES),--times tests/times.md)
STAMP := $(VENV)/.installed
# Of `make curves`.
SEEDS ?= 5
STEPS ?= 24

.DEFAULT_GOAL := help
.PHONY: help setup quickstart test test-fast test-nightly check lint types house format docs bench curves pocket pocket-worlds clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 20

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $(STAMP)

setup: $(STAMP) ## create .venv and install the package and its tools into it

quickstart: $(STAMP) ## train the bundled model on a multi-turn tool task (a few minutes on two cores, setup included)
	$(BIN)/agentfly train recipes/quickstart.toml

test-fast: $(STAMP) ## run the tests that need no training and no documentation (a minute and a half on two cores)
	$(RUN_TESTS) --fast

test: $(STAMP) ## run all tests (AGAIN=1: failed ones once more, alone; WORKERS=8: more processes; TIMES=1: tests/times.md)
	$(RUN_TESTS)

test-nightly: $(STAMP) ## run the tests that `make test` leaves out
	$(RUN_TESTS) --nightly

check: lint types house ## lint, format, types and the test of the architecture (make -j2: at the same time)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

house: $(STAMP)
	$(BIN)/python -m pytest tests/house

format: $(STAMP) ## apply ruff's fixes and formatting
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(STAMP) ## build the documentation as a site in site/
	$(BIN)/python -m mkdocs build --strict --quiet
	@echo "site/index.html"

bench: $(STAMP) ## run the benchmarks and print their tables
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/render.py
	$(BIN)/python benchmarks/engine.py
	$(BIN)/python benchmarks/resources.py
	$(BIN)/python benchmarks/sandbox.py

CURVES := benchmarks/results/curves_pocket_alfworld.json
FIGURE := docs/figures/pocket_alfworld
TEACHER := runs/alfworld-teacher
DRAW = $(BIN)/python benchmarks/curves.py draw $(CURVES) --metric rollout/success --metric reward/mean --metric train/entropy
curves: $(STAMP) ## train every algorithm with SEEDS=5 seeds, one run per core at once, and draw the curves; goes on after a break
	test -n "$(wildcard $(TEACHER)/checkpoints/step-*)" || $(BIN)/agentfly sft alfworld data.train=easy_alfworld \
		data.train_count=600 train.steps=20 train.lr=5e-4 run.name=$(notdir $(TEACHER))
	$(BIN)/python benchmarks/algorithms.py --recipe alfworld --teacher $(TEACHER) --json $(CURVES) --steps $(STEPS) \
		--seeds $(shell seq 0 $$(($(SEEDS) - 1))) --minibatches 2 --tasks 16 \
		--set rollout.num_chains=2 train.lr=3e-5 ppo:train.critic_lr=5e-4
	$(DRAW) --metric train/explained_variance --svg $(FIGURE).svg --only grpo dr_grpo rloo reinforce++ reinforce++_baseline ppo
	$(DRAW) --svg $(FIGURE)_2.svg --only grpo gspo cispo opo gigpo distill

pocket: $(STAMP) ## build the bundled model again (minutes on a GPU, longer on a CPU)
	$(BIN)/python scripts/pocket/build.py

pocket-worlds: $(STAMP) ## build the bundled model of the text worlds again (minutes on a GPU, hours on a CPU)
	$(BIN)/python scripts/pocket/build_worlds.py

clean: ## remove .venv and every cache
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist site
