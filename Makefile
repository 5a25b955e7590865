# `make reproduce` and `make test` are all a fresh machine with Python 3.11 and make needs.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
SANITIZE := -fsanitize=address,undefined -fno-sanitize-recover=undefined -DMSLMN_POISON -g

.PHONY: help install reproduce test lint types unit examples soak sanitize format clean
help:    ## this list
	@grep -E '^[a-z]+: .*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */\t/' | expand -t 12

# The stamp is newer than what it was installed from, or the environment is made again.
$(VENV)/installed: pyproject.toml setup.py constraints.txt src/mslmn/ops/cpu.cpp
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

install: $(VENV)/installed  ## .venv with the package and what its experiments and tests need, at pinned versions

reproduce: install  ## the paper's experiments on embedded data, in minutes; ends with runs/report.html
	$(BIN)/mslmn reproduce all --preset quick --out runs --resume

test: lint types unit  ## lint, type-check, test: what CI runs

lint: install  ## ruff: rules and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install  ## mypy, strict
	$(BIN)/mypy

unit: install  ## pytest, on every core
	$(BIN)/python -m pytest -n auto --dist worksteal -q

examples: install  ## run the examples: a memorised photograph (memorise.png), a network that grows
	$(BIN)/python examples/memorise.py
	$(BIN)/python examples/grow_by_hand.py

soak: install  ## kill an incremental run 20 times, resume it, compare
	MSLMN_KILLS=20 $(BIN)/python -m pytest -n auto -q tests/test_training.py -k killed

sanitize: install  ## the kernels' tests under AddressSanitizer and UndefinedBehaviorSanitizer (needs gcc)
	rm -rf build
	CFLAGS="$(SANITIZE)" CXXFLAGS="$(SANITIZE)" $(BIN)/python -m pip install --quiet --no-deps --target build/sanitized .
	nm -D build/sanitized/mslmn/ops/_cpu*.so | grep -q __asan_  # or nothing was sanitized
	LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)" \
	  ASAN_OPTIONS=detect_leaks=0 PYTHONPATH=build/sanitized $(BIN)/python -m pytest -q -p no:cacheprovider \
	  -W "ignore::DeprecationWarning" tests/test_backends.py -k "not opcheck and not environment"

format: install  ## rewrite the files as ruff wants them
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:   ## forget the environment and every cache
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build src/*.egg-info src/mslmn/ops/*.so
