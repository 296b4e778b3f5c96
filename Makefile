# Every target works as the only command on a fresh clone: it makes the virtual environment it needs first.

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
DEPENDENCIES := $(VENV)/.dependencies
READY := $(VENV)/.ready
# Compiling what is installed takes longer than compiling what is then imported.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest
# One process a core: the interpreter's kernels run on one thread. A file's tests share their set-up, so they stay together.
JOBS ?= 2
# Seed of the random inputs; a fresh one if not given.
SEED ?=

.PHONY: venv test lint format demo gpu-test clean

venv: $(READY)

# SGLang goes in without its dependencies: most of them need a GPU, and none of those is imported by what we run.
$(DEPENDENCIES): $(wildcard requirements/*.txt)
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	$(PIP) -r requirements/sglang-stack.txt -r requirements/dev.txt -c requirements/constraints.txt
	$(PIP) --no-deps -r requirements/sglang.txt
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps -d $(VENV)/wheels -r requirements/aiter.txt
	touch $@

$(READY): $(DEPENDENCIES) pyproject.toml
	$(PIP) --no-deps --no-build-isolation -e .
	touch $@

test: $(READY)
	$(PYTEST) -n $(JOBS) --dist loadfile $(if $(SEED),--seed $(SEED))

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

demo: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/glm53-mono demo

# On a machine with a GPU: the tests that need one, in the environment that is active there.
gpu-test:
	python3 -m pytest -m gpu

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
