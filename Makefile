# Two commands on a fresh machine: `make demo` and `make test`.
#
#   make test EXTRAS=cuda13     on a machine with an NVIDIA GPU (EXTRAS=tpu: with a TPU)
#   make test JAX=0.11.2        with that version of JAX
#   make test PYTHON=python3.13 with that Python, in an environment of its own
#   make test LATEST=1          with the newest of everything, not the versions in constraints/
#   make test TESTS=tests/kernels
#   make test JAXKV_NIGHTLY=1   more of what takes long: random operations, whole models compiled
#   make lint                   ruff, and mypy
#   make docs                   the site of docs/, strict; make constraints, make clean
#   make night                  all of that, file by file; called again at the same commit it goes on where it was cut

PYTHON ?= python3
EXTRAS ?=
JAX ?=
LATEST ?=
TESTS ?= tests
# The extra that tests are run with: `check` has what most of them need, and installs in a third of the time.
NEEDS ?= test

OTHER := $(notdir $(filter-out python3,$(PYTHON)))
VENV := .venv$(if $(OTHER),-$(OTHER))$(if $(JAX),-$(JAX))$(if $(LATEST),-latest)
BIN := $(VENV)/bin
comma := ,
with = .[$(1)$(if $(EXTRAS),$(comma)$(EXTRAS))]
jax := $(if $(JAX),jax==$(JAX) jaxlib==$(JAX))

# The versions last proved; a version of JAX that has no file here is installed with the newest of everything else.
CONSTRAINTS := constraints/jax$(if $(JAX),-$(JAX)).txt
PROVED := $(if $(LATEST),,$(wildcard $(CONSTRAINTS)))
# Python compiles what it imports, and keeps it: to compile every module of every package takes as long as all the rest.
PIP := $(BIN)/python -m pip install --quiet --no-compile $(PROVED:%=--constraint %)

# Without an accelerator of its own a process must not go looking for one: what compiles for TPUs and GPUs is near.
# With one, it must not be shared among several test processes. worksteal keeps neighbours in one process, which then
# compiles once what they share.
ifeq ($(EXTRAS),)
export JAX_PLATFORMS := cpu
PARALLEL := -n auto --dist worksteal
endif

.PHONY: help demo test night lint docs constraints clean

demo: $(firstword $(wildcard $(VENV)/test.installed) $(VENV)/gguf.installed)
	$(BIN)/python -m jaxkv demo

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//; p' Makefile

test: $(VENV)/$(NEEDS).installed $(if $(EXTRAS)$(JAX)$(OTHER),,$(VENV)/compile.installed)
	JAXKV_COMPILE_SITE=$(abspath $(VENV)/compile) $(BIN)/python -m pytest $(PARALLEL) $(TESTS)

# Hours on two cores. Each file's seconds are kept beside the environment: what has passed at this commit is not run again.
NIGHT := $(VENV)/night/$(shell git rev-parse --short HEAD 2>/dev/null)
night: $(VENV)/test.installed $(VENV)/compile.installed $(VENV)/ray.installed
	@mkdir -p $(NIGHT); failed=; files=$$(find $(TESTS) -name 'test_*.py' | sort); \
	for file in $$files; do \
	  passed=$(NIGHT)/$$(echo $$file | tr / .); [ -e $$passed ] && continue; \
	  begin=$$(date +%s); echo "$$file: $$(ls $(NIGHT) | wc -l) of $$(echo $$files | wc -w) files have passed"; \
	  JAXKV_NIGHTLY=1 JAXKV_COMPILE_SITE=$(abspath $(VENV)/compile) $(BIN)/python -m pytest -q $(PARALLEL) $$file \
	    && echo $$(($$(date +%s) - begin)) > $$passed || failed="$$failed $$file"; \
	done; \
	cat $(NIGHT)/* 2>/dev/null | awk '{s += $$1} END {printf "%d files passed in %.1f hours\n", NR, s / 3600}'; \
	[ -z "$$failed" ] || { echo "failed:$$failed"; exit 1; }

lint: $(VENV)/test.installed
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

# Fails on a broken link, and on a public name without a docstring.
docs: $(VENV)/docs.installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --site-dir $(abspath $(VENV))/site
	@echo "$(VENV)/site/index.html"

$(VENV):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 12))' || { \
	  echo "jaxkv needs Python 3.12 or newer, but '$(PYTHON)' is $$($(PYTHON) -V 2>&1): install one, and name it with make PYTHON=/path/to/python3.12."; \
	  exit 1; }
	$(PYTHON) -m venv $(VENV)

# One environment takes what several targets want of the extras, one after another. setuptools first, so that what builds
# the package is held to its version too: pip does not hold a build of its own. What setuptools writes goes into the
# environment, so that several may be installed at a time.
$(VENV)/%.installed: pyproject.toml $(PROVED) | $(VENV)
	$(PIP) setuptools
	@printf '[egg_info]\negg_base = %s\n' '$(abspath $(VENV))' > $(VENV)/setuptools.cfg
	DIST_EXTRA_CONFIG=$(abspath $(VENV))/setuptools.cfg $(PIP) $(jax) --no-build-isolation --editable '$(call with,$*)'
	touch $@

# What compiles for a TPU or a GPU where there is none lives beside the environment, not in it: libtpu would break a
# plain `import jax`. The plugin must have jaxlib's own version.
$(VENV)/compile.installed: $(VENV)/test.installed
	$(PIP) --no-deps --upgrade --target $(VENV)/compile $$($(BIN)/python -c "import tomllib, jaxlib; \
	  wanted = tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['compile']; \
	  print(*(w + '==' + jaxlib.__version__ if w.startswith('jax-') else w for w in wanted))")
	touch $@

# Asks pip what it would take today, chips included (their JAX names the libtpu that it wants), and installs nothing.
# Run `make test` with what it wrote before it is committed.
constraints: | $(VENV)
	$(BIN)/python -m pip install --quiet --dry-run --ignore-installed --report $(VENV)/report.json $(jax) '.[test,docs,ray,cuda13,tpu]'
	@mkdir -p constraints
	@$(BIN)/python -c "import json, sys; \
	  found = [p['metadata'] for p in json.load(sys.stdin)['install']]; \
	  print('# The versions that make demo and make test install and were last proved with: make constraints renews them.'); \
	  print(*sorted(p['name'].lower() + '==' + p['version'] for p in found if p['name'] != 'jaxkv'), sep='\n')" \
	  < $(VENV)/report.json > $(CONSTRAINTS)

clean:
	rm -rf .venv .venv-* build *.egg-info
