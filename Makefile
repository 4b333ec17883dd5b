# Two commands matter: `make serve` and `make test`. Both install what they need into .venv first.
PYTHON ?= python3
BIN := .venv/bin

# Only what was given on the command line or in the environment reaches the server; it knows the other defaults.
serve_flags = $(if $(MODEL),--model '$(MODEL)') $(if $(HOST),--host '$(HOST)') $(if $(PORT),--port '$(PORT)')

# "compat" puts this folder on the path, so that a clone called helios/ is never mistaken for the package.
pip_install = $(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt --config-settings editable_mode=compat

.PHONY: help setup setup-dev serve chat test bench bench-vllm gpu-check export notebooks book book-serve links clean
.DEFAULT_GOAL := help

help:
	@echo "make serve      install Helios, fetch the embedded model, serve it on 127.0.0.1:8000   (PORT=… MODEL=… HOST=…)"
	@echo "make setup      install only"
	@echo "make chat       talk to the served model in this terminal"
	@echo "make test       install the development extras and run every check of the project"
	@echo "make bench      the 30-request benchmark on the embedded model"
	@echo "make bench-vllm Helios, vLLM and transformers in turn on this machine: half an hour, 3.5 GB for vLLM"
	@echo "make gpu-check  is Helios right and fast on this machine's CUDA device? six minutes; installs nothing"
	@echo "make export     write helios/ from the notebooks;  make links: badges and links from the project's URL"
	@echo "make notebooks  open the book's notebooks in Jupyter"
	@echo "make book       build the book's site into public/, strictly;  make book-serve: preview it, built again at each change"

setup: .venv/installed
setup-dev: .venv/installed-dev

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Helios needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1). Choose one: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@$(PYTHON) -m venv .venv || { rm -rf .venv; \
	  echo "Python could not make a virtual environment. On Debian or Ubuntu: apt-get install python3-venv, then run make again."; exit 1; }

.venv/installed: pyproject.toml constraints.txt | .venv/bin/python
	@echo "Installing Helios into .venv: a minute or two, about 1.2 GB (several more where pip takes a CUDA build of torch)."
	$(pip_install) -e .
	@touch $@

.venv/installed-dev: .venv/installed
	@echo "Installing the development extras: a minute or two."
	$(pip_install) -e '.[dev]'
	@touch $@

serve: setup
	@exec $(BIN)/helios serve $(serve_flags)

chat: setup
	@exec $(BIN)/helios chat $(if $(MODEL),--model '$(MODEL)')

test: setup-dev
	@$(BIN)/python tests/run_all.py $(ONLY)

bench: setup
	@$(BIN)/helios bench $(if $(MODEL),--model '$(MODEL)')

bench-vllm: setup-dev
	@$(BIN)/helios fetch
	@$(BIN)/python scripts/bench_vllm.py $(FLAGS)

# On a machine whose Python has torch with CUDA: nothing is installed, nothing is fetched.
gpu-check:
	@$(or $(wildcard $(BIN)/python),$(PYTHON)) -m tests.gpu.check --json gpu-check.json $(ARGS)

export: setup
	@$(BIN)/helios export

links: setup
	@$(BIN)/helios book links

notebooks: setup-dev
	@exec $(BIN)/jupyter lab notebooks

book: setup-dev
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "Open public/index.html"

book-serve: setup-dev
	@exec $(BIN)/python site/preview.py $(PORT)

clean:
	rm -rf public build .pytest_cache .mypy_cache .ruff_cache .hypothesis
