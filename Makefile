# Every target sets up what it needs in .venv first; two commands are enough on a fresh machine:
#   make demo   trains the tiny preset with base and bell and prints both likelihoods
#   make test   lint, types, tests, and a training with the built wheel

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.ready
# one thread per process: tests run side by side
TEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

.PHONY: setup lint types test test-full wheel demo bench clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		--config-settings editable_mode=compat -e '.[dev]'
	touch $(STAMP)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

test: lint types
	$(TEST)
	$(MAKE) wheel

test-full: lint types
	$(TEST) -m ''
	$(MAKE) wheel

wheel: $(STAMP)
	$(BIN)/python tests/check_wheel.py

demo: $(STAMP)
	$(BIN)/bellmask train tiny_base --out runs/demo-base --resume auto
	$(BIN)/bellmask train tiny_bell --out runs/demo-bell --resume auto
	$(BIN)/python -m bellmask.report.curves runs/demo-base runs/demo-bell

bench: $(STAMP)
	$(BIN)/python benchmarks/step.py
	$(BIN)/python benchmarks/data.py

clean:
	rm -rf .venv .venv-wheel build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
