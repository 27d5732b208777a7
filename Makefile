# Inference Camp. `make lab` opens the lab, `make test` proves everything, `make demo` grades a small class.
# Each sets everything up first; that needs Python 3.11 to 3.13 and make, and honours pip's own configuration.

# The first Python that the locks have wheels for.
PYTHON ?= $(shell for p in python3 python3.11 python3.12 python3.13 python; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null && echo $$p && break; done)
# auto: cuda where nvidia-smi finds a GPU, else cpu.
FLAVOUR ?= auto
VENV ?= .venv
# The one host that is named here: PyTorch's own index of CPU wheels. It is asked only where pip's own configuration
# (mirrors, local wheel folders) offers no "+cpu" wheel of the locked torch.
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu
LAB ?=
LAB_ARGS ?=
PYTEST_ARGS ?=

BIN := $(VENV)/bin

.PHONY: help setup lab test tests lint check demo doctor locks whole

help:
	@echo 'make lab [LAB=lab1_paged_attention] [LAB_ARGS=--no-browser]   set up, then open a lab in JupyterLab'
	@echo 'make test [PYTEST_ARGS=...]                                   set up, then lint, types, drift and all tests'
	@echo 'make demo                                                     set up, then grade a small class of submissions'
	@echo 'make doctor                                                   set up, then say what this machine can do'
	@echo 'make setup [FLAVOUR=auto|cpu|cuda] [PYTHON=python3.12]        set up only'
	@echo 'make locks [UPGRADE=1]                                        maintainers: write locks/ again (needs uv)'

setup:
	@test -n '$(PYTHON)' || { echo 'set-up: no Python 3.11, 3.12 or 3.13 found: install one, or name it: make PYTHON=...' >&2; exit 1; }
	@$(PYTHON) tools/set_up.py --flavour $(FLAVOUR) --venv $(VENV) --torch-cpu-index $(TORCH_CPU_INDEX)

lab: setup
	$(BIN)/labkit start $(LAB) $(LAB_ARGS)

test: lint check tests

tests: whole setup
	$(BIN)/python -m pytest $(PYTEST_ARGS)

# Before any set-up: a student's bundle has labs, labkit and kernels, and nothing to grade them with.
whole:
	@test -d grading || { echo "make $(MAKECMDGOALS) needs grading/ and tests/, which a student's bundle does not hold:" \
		"'make lab' opens the lab, 'labkit check LAB' checks your work" >&2; exit 1; }

lint: whole setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

check: whole setup
	$(BIN)/labkit build --check

demo: whole setup
	$(BIN)/python -m grading demo

doctor: setup
	$(BIN)/python -m labkit.doctor

locks:
	$(PYTHON) tools/lock.py $(if $(UPGRADE),--upgrade)
