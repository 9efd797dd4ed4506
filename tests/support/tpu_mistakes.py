"""Known-bad kernels: copies of the TPU backend with mistakes planted in them, for the negative controls."""

import importlib
import itertools
import pathlib

import jax
import pytest
from planting import Sources

from pallas_kernels import testing, tpu

SOURCES = Sources(pathlib.Path(tpu.__file__).parent, "pallas_kernels.tpu")
NOTICED = (AssertionError, jax.errors.JaxRuntimeError)  # wrong, or raised by the interpreter
names = (f"broken_tpu_{i}" for i in itertools.count())


def broken(tmp_path, monkeypatch, *plants):
    """The kernels' package under another name, with mistakes planted in it."""
    name = next(names)
    SOURCES.write_copy(tmp_path, name, *plants)
    monkeypatch.syspath_prepend(tmp_path)
    tpu = importlib.import_module(name)
    importlib.import_module(f"{name}.decode").SEGMENTS = 3
    importlib.import_module(f"{name}.write").SLOTS = 2
    return tpu


def check_noticed(control, tmp_path, monkeypatch):
    """What runs a case in a mode fails with the mistake of a control `(run, case, mode, *plants)`."""
    run, case, mode, *plants = control
    tpu = broken(tmp_path, monkeypatch, *plants)
    with pytest.raises(NOTICED):
        run(tpu, case, mode)


def check_unbroken(controls, tmp_path, monkeypatch):
    """The controls' own cases pass on an unchanged copy."""
    tpu = broken(tmp_path, monkeypatch)
    for run, case, mode in {control[:3] for control in controls.values()}:
        run(tpu, case, mode)


def check_precision(tpu, case, mode):
    """A CPU multiplies in float32 whatever it is told: what a TPU is told stands in the program."""
    inputs = testing.make_inputs(case)
    program = str(jax.make_jaxpr(lambda *x: testing.run(tpu.paged_attention, *x))(*inputs))
    products = program.count("dot_general[")
    assert products and program.count("HIGHEST, Precision.HIGHEST") + program.count("precision=HIGHEST") >= products, (
        "error: products of float32 at less than its precision"
    )
