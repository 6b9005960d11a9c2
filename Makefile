# make demo: set up and answer a few questions.  make test: set up and pass the tests.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test lint bench clean

demo: $(VENV)/.core
	$(BIN)/python example.py

test: $(VENV)/.dev lint
	OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -n 2 --dist loadfile

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.core
	$(BIN)/python bench.py --num-seqs 32 --min-input-len 32 --max-input-len 256 --min-output-len 32 --max-output-len 128

clean:
	rm -rf $(VENV)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("nanovllm needs Python 3.11 or newer, this is " + sys.version.split()[0] + "; name another one: make demo PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV) || { rm -f $@; exit 1; }

$(VENV)/.core: $(BIN)/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install -c constraints.txt -e .
	touch $@

$(VENV)/.dev: $(BIN)/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install -c constraints.txt -e '.[dev]'
	touch $@ $(VENV)/.core
