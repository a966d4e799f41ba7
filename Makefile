# make demo   a small real model answers the prompts of examples/ through the asynchronous loop
# make test   all tests
# Both create .venv and bring the model on their first call. Others: make clients, lint, types, model, readme, lines,
# clean.
#
# PYTHON and VENV may be given: make test PYTHON=python3.12 VENV=/tmp/venv

PYTHON ?= $(shell for p in python3.11 python3 python3.12 python3.13 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV ?= .venv
BIN := $(VENV)/bin
WORKERS ?= 2
# The pins of constraints-dev.txt hold unless the environment brings a torch for CUDA, which is kept as it is.
CUDA := import importlib.util as u, sys; sys.exit(not u.find_spec("torch") or __import__("torch").version.cuda is None)
INSTALL = if $(BIN)/python -c '$(CUDA)' 2>/dev/null; then pins=; else pins='-c constraints-dev.txt'; fi; \
	$(BIN)/python -m pip install --quiet $$pins

.PHONY: demo test clients lint types install model readme lines clean

demo: $(VENV)/.demo model
	$(BIN)/python examples/demo.py

# One thread for torch in each worker: two processes share the cores better than two pools of threads.
test: $(VENV)/.dev model
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS)

# Clients of OpenAI's interface, each in an environment of its own, against a real server. Minutes and gigabytes the
# first time. CLIENTS="openai lm-eval" runs some of them.
clients: $(VENV)/.dev model
	$(BIN)/python tools/clients.py $(CLIENTS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .

types: $(VENV)/.dev
	$(BIN)/mypy

install: $(VENV)/.dev

# Prints the model's folder; the first call downloads and converts it.
model: $(VENV)/.demo
	@$(BIN)/python -m gapless.model.load.smollm2

$(VENV)/.demo: pyproject.toml constraints-dev.txt | $(BIN)/python
	$(INSTALL) -e '.[gguf]'
	@touch $@

$(VENV)/.dev: pyproject.toml constraints-dev.txt | $(BIN)/python
	$(INSTALL) -e '.[gguf,dev]'
	@touch $@ $(VENV)/.demo

# A torch for CUDA that is installed beside PYTHON is used instead of fetching another.
$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "no Python >= 3.11 found: give one with PYTHON=" >&2; exit 1; }
	$(PYTHON) -m venv $$($(PYTHON) -c '$(CUDA)' 2>/dev/null && echo --system-site-packages) $(VENV)

# Writes what the documents quote of the code: the loop in README.md, the rooms in docs/architecture.md.
readme: $(VENV)/.dev
	$(BIN)/python tools/quote_loop.py
	$(BIN)/python tools/rooms.py

# Lines of the files that a step passes through, and of the rest.
lines:
	@$(PYTHON) tools/lines.py

clean:
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
