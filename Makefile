# Each target works alone on a fresh clone that has python3 (3.11 or newer), a C++20 compiler and make;
# cmake and ninja come from PyPI. `make setup` twice does nothing the second time.
#
#   make demo | test | bench | drill | fuzz | lint | clean
#   TORCH        what to install if no torch is there yet; an existing one is kept
#   TORCH_ARGS   more arguments for that one pip call, for instance another index (see CONTRIBUTING.md)
#   PYTEST_ARGS, DEMO_ARGS, BENCH_ARGS   passed on

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
TORCH_ARGS ?=
PYTEST_ARGS ?=
DEMO_ARGS ?=
BENCH_ARGS ?=

bin := $(abspath $(VENV))/bin
stamps := $(VENV)/stamps
pip := $(bin)/python -m pip --disable-pip-version-check install --quiet
# No package may replace the torch that is there: every later pip call is held to its exact version.
keep_torch := --constraint $(stamps)/torch
# Warnings of the compiler end our builds, not a user's.
build_settings := --config-settings=build.verbose=false --config-settings=cmake.define.CMAKE_COMPILE_WARNING_AS_ERROR=ON
native_files := $(shell find native cmake CMakeLists.txt -type f 2>/dev/null)

.PHONY: help setup demo test bench drill fuzz lint format clean
help:
	@sed -n 's/^# \{0,1\}//p' Makefile | head -8

setup: $(stamps)/installed $(stamps)/checks

# A torch in the base interpreter (a CUDA build on a GPU machine, say) is seen through, not installed again.
$(stamps)/venv:
	@if $(PYTHON) -c 'import torch' 2>/dev/null; then see=--system-site-packages; else see=; fi; \
	echo "setup: $(VENV) $$see"; $(PYTHON) -m venv $$see $(VENV); mkdir -p $(stamps)
	@$(pip) --upgrade 'pip>=25.1'
	@touch $@

# The stamp is a pip constraint that names the torch in use.
$(stamps)/torch: $(stamps)/venv
	@$(bin)/python -c 'import torch' 2>/dev/null || { echo "setup: $(TORCH)"; $(pip) $(TORCH_ARGS) '$(TORCH)'; }
	@$(bin)/python -W ignore -c 'import torch; print(f"torch=={torch.__version__}")' > $@

$(stamps)/build: $(stamps)/torch pyproject.toml
	@echo "setup: what builds and measures"
	@$(pip) $(keep_torch) --group build --group bench
	@touch $@

$(stamps)/checks: $(stamps)/build
	@echo "setup: what tests and checks"
	@$(pip) $(keep_torch) --group test --group lint
	@touch $@

# Editable: Python files are used where they lie. Only a change to native/ or to the build files comes back here.
$(stamps)/installed: $(stamps)/build $(native_files)
	@echo "setup: zerostall with its native module"
	@$(pip) $(keep_torch) --no-build-isolation $(build_settings) --editable '.[cli,remote,manager]'
	@cp "$$($(bin)/python -c 'import sysconfig; print(sysconfig.get_path("platlib"))')"/zerostall/_native.pyi src/zerostall/
	@touch $@

$(stamps)/stores: $(stamps)/installed
	@$(pip) $(keep_torch) --group stores || echo "setup: seaweedfs could not be installed; its tests will say so"
	@touch $@

$(stamps)/peers: $(stamps)/installed
	@$(pip) $(keep_torch) --group peers || echo "setup: the peers could not be installed; rows and tests will say so"
	@touch $@

demo: $(stamps)/installed
	@$(bin)/python examples/gpt/demo.py $(DEMO_ARGS)

test: setup $(stamps)/stores $(stamps)/peers
	@$(bin)/python -m pytest $(PYTEST_ARGS)

bench: setup $(stamps)/peers
	@$(bin)/python -m benchmarks $(BENCH_ARGS)

# A node dies while it trains; how long until the next finished step. As root, for it makes network namespaces.
drill: setup
	@$(bin)/python -m benchmarks.drill $(BENCH_ARGS)

# Every target of tests/fuzz for a minute, guided by coverage; the rest of the long forms: make test PYTEST_ARGS=--long
fuzz: setup
	@$(pip) $(keep_torch) --group fuzz
	@$(bin)/python -m pytest --long tests/fuzz $(PYTEST_ARGS)

lint: setup
	@! git grep -nE '^(<{7}|>{7}|[|]{7})( |$$)' 2>/dev/null || { echo "lint: left over from a merge"; exit 1; }
	@$(bin)/ruff check .
	@$(bin)/ruff format --check .
	@$(bin)/lint-imports
	@$(bin)/pyright --pythonpath $(bin)/python
	@find native tests -regex '.*[.]\(c\|h\|cpp\|hpp\)' | xargs --no-run-if-empty $(bin)/clang-format --dry-run -Werror

format: setup
	@$(bin)/ruff check --fix .
	@$(bin)/ruff format .
	@find native tests -regex '.*[.]\(c\|h\|cpp\|hpp\)' | xargs --no-run-if-empty $(bin)/clang-format -i

clean:
	rm -rf build dist $(VENV) .pytest_cache .ruff_cache .hypothesis .import_linter_cache src/zerostall/_native*
