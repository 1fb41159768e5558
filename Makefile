# `make demo` and `make test` need nothing but Python and a package index. On a machine without an index, name an
# interpreter that has the packages: `make test PYTHON=python3` runs from source and installs nothing.

ifdef PYTHON
RUN := PYTHONPATH=src $(PYTHON)
DEMO_ENV :=
DEV_ENV :=
FUZZ_ENV :=
OFFLINE_ENV :=
else
RUN := .venv/bin/python
DEMO_ENV := .venv/.demo
DEV_ENV := .venv/.dev
FUZZ_ENV := .venv/.fuzz
OFFLINE_ENV := .venv/.offline
endif

RESULTS := docs/benchmarks
KERNELS := $(filter attention rotary metadata interpolation row_counts breakdown, $(basename $(notdir $(wildcard benchmarks/*.py))))

.PHONY: demo test test-gpu test-matrix test-newest test-engines test-offline score soak fuzz mutants check fix bench bench-encoders bench-kernels coverage coverage-outside plots docs clean

demo: $(DEMO_ENV)
	$(RUN) -m varlen_graphs demo --picture demo.png $(ARGS)

# One process a core and one more, where pytest-xdist is installed; the tests of a file run in one of them, and share what
# they start. In the order of the files: those of few but long tests would run last, beside an idle core.
test: $(DEV_ENV)
	$(RUN) -m pytest -m "not gpu" $$($(RUN) -c "import xdist" 2> /dev/null && echo --numprocesses=auto --dist=loadfile --no-loadscope-reorder) $(ARGS)

test-gpu: $(DEV_ENV)
	$(RUN) -m pytest -m gpu $(ARGS)

# The job and the server on Ray, which is large, so that `make test` does without.
test-offline: $(OFFLINE_ENV)
	$(RUN) -m pytest tests/project/test_embed_folder.py tests/project/test_examples.py tests/servers \
	    tests/servers/workers.py $(ARGS)

# The doctor and default encoders over tests/doctor/corpus; writes the score into docs/doctor.md.
score: $(DEV_ENV)
	$(RUN) -m tests.doctor.corpus $(ARGS)

# Random encoders, graphed against eager, for three minutes: `make soak ARGS="--minutes 30"`; with `--wrong encoders`,
# `--wrong state` or `--wrong declarations`, those that must not answer wrongly.
soak: $(DEV_ENV)
	$(RUN) -m tests.soak $(ARGS)

# Faults of one token in the core, and whether the tests find them; more than a minute each.
mutants: $(DEV_ENV)
	$(RUN) -m tests.mutants $(ARGS)

# Layouts as attackers may send them and damaged files, guided by coverage, for two minutes: `make fuzz ARGS=-max_total_time=600`.
fuzz: $(FUZZ_ENV)
	mkdir -p .fuzz
	$(RUN) -m tests.fuzz -artifact_prefix=.fuzz/ -max_total_time=120 $(ARGS)

# The tests of recipes and of whole models on other versions of transformers, each in an environment of its own.
MATRIX := 4.57.6 5.17.0 5.23.0 5.24.0
test-matrix: $(addprefix .matrix/,$(addsuffix /.done,$(MATRIX)))
	for version in $(MATRIX); do \
	    .matrix/$$version/bin/python -m pytest -p no:cacheprovider -m "not gpu" $(MATRIX_TESTS) $(ARGS) || exit; \
	done

# The same on the newest transformers that the package index offers, which is looked for each time.
test-newest: .matrix/newest/.done
	.matrix/newest/bin/python -m pip install --quiet --upgrade transformers
	.matrix/newest/bin/python -m pip show transformers | grep Version
	.matrix/newest/bin/python -m pytest -p no:cacheprovider -m "not gpu" $(MATRIX_TESTS) $(ARGS)

MATRIX_TESTS := tests/recipes tests/huggingface tests/demo

.matrix/%/.done: pyproject.toml constraints/cpu.txt
	python3 -m venv .matrix/$*
	grep -v '^transformers==' constraints/cpu.txt > .matrix/$*/constraints.txt
	.matrix/$*/bin/python -m pip install --quiet --constraint .matrix/$*/constraints.txt --editable ".[dev]" \
	    transformers$(if $(filter newest,$*),,==$*)
	touch $@

# Each engine's own released Python files, in an environment of its own; its version is that of the extra in pyproject.toml.
ENGINES := sglang vllm
test-engines: $(addprefix .engines/,$(addsuffix /.done,$(ENGINES)))
	for engine in $(ENGINES); do \
	    .engines/$$engine/bin/python -m pytest -p no:cacheprovider tests/engines/test_$$engine.py $(ARGS) || exit; \
	done

.engines/%/.done: pyproject.toml constraints/engines/%.txt
	python3 -m venv .engines/$*
	.engines/$*/bin/python -m pip install --quiet --requirement constraints/engines/$*.txt --editable .
	.engines/$*/bin/python -m pip install --quiet --no-deps $$(grep --only-matching '$*==[0-9.]*' pyproject.toml)
	touch $@

check: $(DEV_ENV)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	PATH="$(CURDIR)/.venv/bin:$(PATH)" PYTHONPATH=src lint-imports

fix: $(DEV_ENV)
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

bench: $(DEV_ENV)
	for size in 8b 2b; do \
	    $(RUN) -m benchmarks.qwen3_vl --size $$size --json $(RESULTS)/qwen3_vl_$$size.json $(ARGS) || exit; \
	done

bench-encoders: $(DEV_ENV)
	for name in encoders sentences; do $(RUN) -m benchmarks.$$name --json $(RESULTS)/$$name.json $(ARGS) || exit; done

bench-kernels: $(DEV_ENV)
	for name in $(KERNELS); do $(RUN) -m benchmarks.$$name --json $(RESULTS)/$$name.json $(ARGS) || exit; done

# What vg.wrap makes of every multimodal, speech, vision and text class of transformers; an hour on two cores.
coverage: $(DEV_ENV)
	$(RUN) -m benchmarks.coverage --json $(RESULTS)/coverage.json $(ARGS)

# The same of modules from other packages, in an environment of its own.
coverage-outside: .outside/.done
	.outside/bin/python -m benchmarks.coverage.outside --json $(RESULTS)/coverage_outside.json $(ARGS)

.outside/.done: pyproject.toml constraints/outside.txt
	python3 -m venv .outside
	.outside/bin/python -m pip install --quiet --requirement constraints/outside.txt --editable .
	touch $@

plots: $(DEV_ENV)
	$(RUN) -m benchmarks.plots $(RESULTS)/qwen3_vl_8b.json --out $(RESULTS)
	$(RUN) -m benchmarks.page

docs: $(DEV_ENV)
	$(RUN) -m zensical build --clean --strict

clean:
	rm -rf .venv .matrix .engines .outside .fuzz build dist site .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache

.venv/bin/python:
	python3 -m venv .venv

.venv/.demo: .venv/bin/python pyproject.toml constraints/cpu.txt
	.venv/bin/python -m pip install --quiet --constraint constraints/cpu.txt --editable ".[demo]"
	touch $@

.venv/.dev: .venv/bin/python pyproject.toml constraints/cpu.txt
	.venv/bin/python -m pip install --quiet --constraint constraints/cpu.txt --editable ".[dev]"
	touch $@ .venv/.demo

.venv/.fuzz: .venv/.dev
	.venv/bin/python -m pip install --quiet --constraint constraints/cpu.txt --editable ".[dev,fuzz]"
	touch $@

.venv/.offline: .venv/.dev
	.venv/bin/python -m pip install --quiet --constraint constraints/cpu.txt --editable ".[dev,offline]"
	touch $@
