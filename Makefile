# Every target sets up what it needs in .venv first; two commands are enough on a fresh machine:
#   make demo   base against bell, three paired seeds: the speed-up
#   make test   lint, types, tests, and a training with the built wheel
# make test-full also runs the slow tests (fuzzing, faults, the programs in the documentation), make test-gpu those for GPUs.
# make evidence repeats the measurements of docs/results.md (hours); PARTS='suites analyses' selects parts, DRY=1 only prints how long
# each takes. With LM1B='files/*' it reads those instead of the hub, with
# TEXTS='ptb=ptb.valid.txt arxiv=papers.jsonl' and COLUMNS='arxiv=text' zero-shot sets, with STORIES=stories260K
# STORIES_TEXT=stories.txt it adapts that small causal LM and evaluates it on the benchmarks (with BENCHMARKS=folder also LAMBADA and
# ROCStories), with CHAT=sharegpt.jsonl it shows answers side by side

PYTHON ?= python3
# versions to install; CONSTRAINTS=/dev/null takes the newest
CONSTRAINTS ?= constraints.txt
BIN := .venv/bin
STAMP := .venv/.ready
# one thread per process: tests run side by side
TEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 2 --dist worksteal --durations 10

.PHONY: setup lint types test test-full test-lowest test-gpu wheel demo docs race bench bench-gpu evidence clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) \
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

# with chromium on the PATH also the pages' scripts (apt-get install chromium)
test-full: lint types
	$(TEST) -m 'not gpu'
	$(MAKE) wheel

# with the lowest versions that pyproject.toml allows, and no extras; old packages warn of new ones
test-lowest:
	$(PYTHON) -m venv .venv-lowest
	.venv-lowest/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-lowest.txt \
		-e . hypothesis mpmath pytest pytest-xdist scipy
	OMP_NUM_THREADS=1 .venv-lowest/bin/python -m pytest -n 2 -W ignore::DeprecationWarning -k 'not trackers' \
		tests/config tests/diffusion tests/storage tests/utils tests/generate tests/report \
		tests/evaluate/test_likelihood.py tests/train/test_resume.py tests/end_to_end/test_commands.py

# golden losses, precisions, compiled blocks, two GPUs, resuming, loss kernels, sampling
test-gpu: $(STAMP)
	BELLMASK_TEST_GPU=1 $(BIN)/python -m pytest -m gpu tests/gpu --durations 10

wheel: $(STAMP)
	$(BIN)/python tests/check_wheel.py

demo: $(STAMP)
	$(BIN)/bellmask demo

# the documentation as pages in site/, readable without a server; a broken link is an error
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# the plain implementation against our recipes, to its final NLL; minutes at small, hours at medium
race: $(STAMP)
	$(BIN)/python benchmarks/race.py $(or $(SIZE),small) --seeds $(or $(SEEDS),3)

bench: $(STAMP)
	$(BIN)/python benchmarks/step.py
	$(BIN)/python benchmarks/growth.py
	$(BIN)/python benchmarks/sampling.py
	$(BIN)/python benchmarks/data.py

# our step on a GPU: objectives, compiled or not; tokens/s, utilization, memory
bench-gpu: $(STAMP)
	$(BIN)/python benchmarks/step.py --gpu --rounds 50

evidence: $(STAMP)
	$(BIN)/python evidence/run.py $(if $(PARTS),--parts $(PARTS)) $(if $(DRY),--dry-run) $(if $(LM1B),--lm1b '$(LM1B)') $(if $(TEXTS),--texts $(TEXTS)) \
		$(if $(COLUMNS),--columns $(COLUMNS)) $(if $(STORIES),--stories '$(STORIES)') \
		$(if $(STORIES_TEXT),--stories-text '$(STORIES_TEXT)') $(if $(CHAT),--chat '$(CHAT)') $(if $(BENCHMARKS),--benchmarks '$(BENCHMARKS)')

clean:
	rm -rf .venv .venv-lowest .venv-wheel build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
