# `make demo` and `make test` need only a Python >= 3.11 that has pip and venv.
#
#   make test ARGS="-k while_loop"        more arguments for the command
#   make test PYTHON=/path/to/python3     the Python of a new environment
#   make test VENV=.venv311               another environment

PYTHON ?=
VENV ?= .venv
ARGS ?=
BIN := $(VENV)/bin

.PHONY: help demo test soak fuzz mutants bench bench-compare lint types layers tables wheel clean
.NOTPARALLEL:

help:
	@echo "make demo     run the demonstration"
	@echo "make test     run the tests"
	@echo "make soak     draw some programs, the same in each run"
	@echo "make fuzz     draw programs for an hour, and compare all their executions"
	@echo "make mutants  plant faults, and find them"
	@echo "make bench    run the benchmarks"
	@echo "make bench-compare OLD=v1 NEW=v2   time the rows in two revisions, by turns"
	@echo "make lint     ruff: the rules, and the format"
	@echo "make types    mypy, strict"
	@echo "make layers   which module may import which"
	@echo "make tables   write the tables in docs/ that the tests make"
	@echo "make wheel    build the wheel and the sdist into dist/, and try the wheel"
	@echo "make clean    remove what was built; the environments stay"

demo: $(VENV)/.has-demo
	$(BIN)/hopflow demo $(ARGS)

test: $(VENV)/.has-test
	$(BIN)/pytest -n auto --maxprocesses 8 --dist worksteal -m "not soak" $(ARGS)

soak: $(VENV)/.has-test
	$(BIN)/pytest -n auto --maxprocesses 8 --dist worksteal -m soak $(ARGS)

fuzz: $(VENV)/.has-test
	$(BIN)/hopflow fuzz --minutes 60 $(ARGS)

mutants: $(VENV)/.has-test
	$(BIN)/pytest -v property_tests/test_mutants.py $(ARGS)

bench: $(VENV)/.has-bench
	$(BIN)/python -m benchmarks $(ARGS)

bench-compare: $(VENV)/.has-bench
	$(BIN)/python -m benchmarks.compare $(OLD) $(NEW) $(ARGS)

tables: $(VENV)/.has-test
	HOPFLOW_WRITE_TABLES=1 $(BIN)/pytest -q tests/test_conformance.py tests/test_export_targets.py $(ARGS)

lint: $(VENV)/.has-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.has-dev
	$(BIN)/mypy $(ARGS)

# Without conftest.py, which imports the package: a circle must not hide its own report.
layers: $(VENV)/.has-test
	$(BIN)/pytest --noconftest tests/test_layers.py $(ARGS)

wheel: $(VENV)/.has-dev
	rm -rf build dist
	$(BIN)/python -m build --quiet
	tools/check_wheel $(BIN)/python dist/*.whl

# An environment that is there, and works, is kept.
$(VENV)/.made:
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { \
	    python="$(PYTHON)"; \
	    [ -n "$$python" ] || python=$$(tools/find_python) || exit 1; \
	    echo "Making $(VENV) with $$("$$python" --version)"; \
	    "$$python" -m venv --clear $(VENV); \
	}
	@touch $@

# One stamp for each extra of pyproject.toml.
$(VENV)/.has-%: pyproject.toml | $(VENV)/.made
	@echo "Installing hopflow[$*] into $(VENV): a minute or two, the first time"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[$*]"
	@touch $@

clean:
	rm -rf build dist demo_output fuzz_output src/hopflow.egg-info
	rm -rf .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -path './.*' -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
