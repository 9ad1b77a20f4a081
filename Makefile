# Two commands do all set-up: `make investigate` and `make test`. Both need Python 3.11 or newer and a network.
PYTHON ?= python3
VENV ?= .venv
OUT ?= out
DEVICE ?= auto
WORKERS ?= 2
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
LAB_INSTALLED := $(VENV)/.installed-lab

.PHONY: investigate test lint types lab clean

investigate: $(INSTALLED)
	$(BIN)/specmortem run --all --device $(DEVICE) --out $(OUT)

test: lint types
	$(BIN)/python -m pytest -n $(WORKERS)

lint: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(INSTALLED)
	$(BIN)/mypy

lab: $(LAB_INSTALLED)
	$(BIN)/jupyter lab --notebook-dir notebooks

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "make: $(PYTHON) is older than Python 3.11; give another with PYTHON=python3.12"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

$(LAB_INSTALLED): $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev,lab]'
	$(BIN)/python -m ipykernel install --sys-prefix --name python3 --display-name "specmortem"
	@touch $@

clean:
	rm -rf $(OUT)
