# Two commands on a fresh machine: `make demo` and `make test`.
#
#   make test EXTRAS=cuda13     on a machine with an NVIDIA GPU (EXTRAS=tpu: with a TPU)
#   make test JAX=0.11.2        with that version of JAX
#   make test TESTS=tests/kernels
#   make test JAXKV_NIGHTLY=1   more of what takes long: random operations, whole models compiled

PYTHON ?= python3
EXTRAS ?=
JAX ?=
TESTS ?= tests

VENV := .venv$(if $(JAX),-$(JAX))
BIN := $(VENV)/bin
comma := ,
with = .[$(1)$(if $(EXTRAS),$(comma)$(EXTRAS))]
PIP := $(BIN)/python -m pip install --quiet $(if $(JAX),jax==$(JAX) jaxlib==$(JAX))

# Without an accelerator of its own a process must not go looking for one: what compiles for TPUs and GPUs is near.
# With one, it must not be shared among several test processes.
ifeq ($(EXTRAS),)
export JAX_PLATFORMS := cpu
PARALLEL := -n auto
endif

.PHONY: demo test lint clean

demo: $(VENV)/demo.installed
	$(BIN)/python -m jaxkv generate

test: $(VENV)/test.installed $(if $(EXTRAS)$(JAX),,$(VENV)/compile.installed)
	JAXKV_COMPILE_SITE=$(abspath $(VENV)/compile) $(BIN)/python -m pytest $(PARALLEL) $(TESTS)

lint: $(VENV)/test.installed
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

$(VENV):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 12))' || { \
	  echo "jaxkv needs Python 3.12 or newer, but '$(PYTHON)' is $$($(PYTHON) -V 2>&1): install one, and name it with make PYTHON=/path/to/python3.12."; \
	  exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/demo.installed: pyproject.toml | $(VENV)
	$(PIP) --editable '$(if $(EXTRAS),.[$(EXTRAS)],.)'
	touch $@

$(VENV)/test.installed: pyproject.toml | $(VENV)
	$(PIP) --editable '$(call with,test)'
	touch $@

# What compiles for a TPU or a GPU where there is none lives beside the environment, not in it: libtpu would break a
# plain `import jax`. The plugin must have jaxlib's own version.
$(VENV)/compile.installed: $(VENV)/test.installed
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $(VENV)/compile $$($(BIN)/python -c "import tomllib, jaxlib; \
	  wanted = tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['compile']; \
	  print(*(w + '==' + jaxlib.__version__ if w.startswith('jax-') else w for w in wanted))")
	touch $@

clean:
	rm -rf .venv .venv-* build *.egg-info
