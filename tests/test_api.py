"""The tables of contents, and the examples in the docs."""

import doctest
import importlib
import importlib.util
import inspect
import pkgutil
import subprocess
import sys

import bundled
import jax
import pytest

import jaxkv
import pallas_kernels

PACKAGES = (jaxkv, pallas_kernels)


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_resolves_and_is_documented(package):
    assert list(package.__all__) == sorted(
        package.__all__, key=lambda name: (not name.isupper(), name[0].islower(), name)
    )
    for name in package.__all__:
        value = getattr(package, name)
        if callable(value) or inspect.ismodule(value):
            assert inspect.getdoc(value), f"{package.__name__}.{name} has no docstring"
            first_line = inspect.getdoc(value).splitlines()[0]
            assert not first_line.startswith(f"{name}("), f"{package.__name__}.{name} has only a generated docstring"


MODULES = ("convert", "distributed", "hooks", "linen", "models", "nnx", "scores", "testing")
PUBLIC = (*PACKAGES, *(getattr(jaxkv, name) for name in MODULES))


@pytest.mark.parametrize("module", PUBLIC, ids=lambda module: module.__name__)
def test_every_public_name_has_an_example(module):
    for name in module.__all__:
        value = getattr(module, name)
        if callable(value):
            assert ">>> " in (inspect.getdoc(value) or ""), f"{module.__name__}.{name} has no example"


@pytest.mark.parametrize("module", PUBLIC[len(PACKAGES) :], ids=lambda module: module.__name__)
def test_help_of_a_module_stands_alone(module):
    """It says how to import it, and what each of its names is for."""
    text = inspect.getdoc(module)
    assert f"`import {module.__name__}`" in text
    assert all(f"`{name}" in text for name in module.__all__ if name not in ("Trace",)), module.__name__


@pytest.mark.parametrize("package", PACKAGES)
def test_init_is_a_table_of_contents(package):
    assert len(inspect.getsource(package).splitlines()) < 90


def test_lazy_modules():
    assert jaxkv.testing.assert_no_copy.__doc__
    assert {"testing", "nnx", "linen", "models"} <= {
        name for name in ("testing", "nnx", "linen", "models") if getattr(jaxkv, name)
    }
    with pytest.raises(AttributeError, match="module 'jaxkv' has no attribute 'atend'"):
        jaxkv.atend  # noqa: B018


def test_public_methods_are_documented():
    for cls in (jaxkv.Cache, jaxkv.CacheConfig, jaxkv.LayerConfig, jaxkv.Engine):
        for name, member in inspect.getmembers(cls):
            if not name.startswith("_") and (callable(member) or isinstance(member, property)):
                assert inspect.getdoc(member), f"{cls.__name__}.{name} has no docstring"


def modules():
    """All modules of both packages that this machine can import: kernels and the command line are run elsewhere."""
    for package in PACKAGES:
        for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            is_extra = info.name == "jaxkv.tunix" and importlib.util.find_spec("tunix") is None
            if not is_extra and not any(part in ("gpu", "tpu", "__main__") for part in info.name.split(".")):
                yield info.name


@pytest.mark.parametrize("name", [package.__name__ for package in PACKAGES] + sorted(modules()))
def test_examples_in_the_docs(name, monkeypatch):
    monkeypatch.setattr(jaxkv.models, "small", bundled.small)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # as in a user's session
        result = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert result.failed == 0


def test_importing_is_cheap():
    """No Flax, no kernel compiler, no network: what not everyone needs is imported when it is used."""
    script = (
        "import sys, jax, jax.numpy, numpy\n"
        "heavy = ('flax', 'urllib.request', 'requests', 'tokenizers', 'jax.experimental.pallas')\n"
        "before = set(sys.modules)\n"
        "import jaxkv, pallas_kernels\n"
        "print(*[name for name in heavy if name in sys.modules and name not in before])"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert not result.stdout.split()


def test_an_extra_that_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "tunix", None)
    monkeypatch.delitem(sys.modules, "jaxkv.tunix", raising=False)
    with pytest.raises(ModuleNotFoundError, match=r"needs tunix: pip install 'jaxkv\[tunix\]'"):
        importlib.import_module("jaxkv.tunix")
