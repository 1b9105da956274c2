# Every target works in a fresh clone: the virtual environment is made once, and again when its inputs change.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SENTENCE ?= a gripping , moving film
SWAPS ?= gripping=captivating,engrossing,absorbing moving=touching,stirring film=movie,picture,drama
BENCH ?=

.PHONY: install demo test portable lint format docs bench soundness fuzz clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "error: Python 3.11 or later is needed (make PYTHON=...)")'
	@echo "Installing into $(VENV) (a few minutes the first time) ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@

demo: install
	@mkdir -p out
	@$(BIN)/buffet certify "$(SENTENCE)" $(SWAPS:%=--swap %) --html out/words.html || test $$? = 1
	@$(BIN)/buffet certify "$(SENTENCE)" --budget 40 --html out/ball.html || test $$? = 1
	@echo "Open out/words.html and out/ball.html in a browser."

# One thread per worker: the tensors of the tests are small, and workers must not fight over the cores.
test: install
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

# The numerical tests with the instructions of another processor (default | avx2 | avx512): one that holds on some
# processors only is a bug.
CAPABILITY ?= default
NUMERICAL := rounding intervals relaxations softmax products regions_minimise methods headwise checker_edges
portable: install
	@ATEN_CPU_CAPABILITY=$(CAPABILITY) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 \
		$(NUMERICAL:%=tests/soundness/test_%.py)

lint: install
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy

format: install
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

# Warnings are errors: a broken link does not land. Needs no network.
docs: install
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

bench: install
	@$(BIN)/buffet bench $(BENCH)

soundness: install
	@$(BIN)/buffet soundness
	@$(BIN)/buffet soundness --extreme
	@cd tests && OMP_NUM_THREADS=1 ../$(BIN)/python -m engine_mutants

fuzz: install
	@cd tests && OMP_NUM_THREADS=1 ../$(BIN)/python -m fuzz --inputs 100000

clean:
	rm -rf $(VENV) out .pytest_cache .ruff_cache .mypy_cache .hypothesis
