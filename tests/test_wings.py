"""A wing imports only wings that stand below it, and no file is imported in a circle; folders stay small."""

import ast
import functools
import itertools
import pathlib
import re

import pytest

import jaxkv
import pallas_kernels

# Lowest first. A module may import what stands in its own wing and in those before it.
WINGS = (
    "pallas_kernels",
    "jaxkv._core.config", "jaxkv._core.state", "jaxkv._core.cache", "jaxkv._core.blocks", "jaxkv._core.attention",
    "jaxkv._products", "jaxkv._files", "jaxkv._tiers", "jaxkv._copies", "jaxkv._drop_in", "jaxkv._layers",
    "jaxkv.convert", "jaxkv.distributed", "jaxkv.scores", "jaxkv.linen", "jaxkv.nnx",
    "jaxkv._engine.requests", "jaxkv._engine.programs", "jaxkv._engine.runner", "jaxkv._engine.hosts",
    "jaxkv._engine.frontend",
    "jaxkv.hooks", "jaxkv.tunix", "jaxkv.models", "jaxkv.text", "jaxkv.testing", "jaxkv._names", "jaxkv", "jaxkv._cli",
    "jaxkv.__main__",
)  # fmt: skip
# Folders that hold wings and no modules of their own.
HALLS = ("jaxkv._core", "jaxkv._engine")
ROOT = pathlib.Path(jaxkv.__file__).parents[1]


@functools.cache
def imports(source):
    """The modules that a source file names, inside functions too."""
    return tuple(find_imports(source))


def find_imports(source):
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports name the whole path"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def wing_of(module):
    """The place of a module in `WINGS`: of the longest name there that it begins with. None for what is not ours."""
    if module in HALLS:
        return None
    parts = module.split(".")
    names = [".".join(parts[:n]) for n in range(len(parts), 0, -1)]
    found = next((name for name in names if name in WINGS and (name != "jaxkv" or len(parts) == 1)), None)
    return None if found is None else WINGS.index(found)


def misplaced(sources):
    """`(module, what it imports)` for each import of a wing that stands further up."""
    for module, source in sources.items():
        here = wing_of(module)
        for name in imports(source):
            there = wing_of(name if name in sources else name.rpartition(".")[0])
            if None not in (here, there) and there > here and not (module == "jaxkv" and name.startswith("jaxkv.")):
                yield module, name


@functools.cache
def modules():
    """Every module of the two packages, with its source."""
    files = [f for package in ("pallas_kernels", "jaxkv") for f in sorted((ROOT / package).rglob("*.py"))]
    return {".".join(f.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): f.read_text() for f in files}


def circles(sources):
    """Modules that import each other, directly or by way of others; what an `__init__` collects is not counted."""
    graph = {}
    for module, source in sources.items():
        named = {name if name in sources else name.rpartition(".")[0] for name in imports(source)}
        graph[module] = {n for n in named if n in sources and n != module}
    left = dict(graph)
    while free := [m for m, needs in left.items() if not needs & left.keys()]:
        for module in free:
            del left[module]
    return {m: needs & left.keys() for m, needs in left.items()}


def test_every_module_has_a_wing():
    assert [m for m in modules() if wing_of(m) is None and m not in HALLS] == []


def test_every_wing_has_a_module_and_says_what_it_is():
    sources = modules()
    assert [w for w in WINGS if w not in sources] == []
    assert [m for m, source in sources.items() if not ast.get_docstring(ast.parse(source))] == []


def read_picture(text):
    """The wings of ARCHITECTURE's picture, lowest first: of a line those further right stand lower."""
    (picture,) = re.findall(r"```text\n(.*?)```", text, re.DOTALL)
    lines = [re.findall(r"^\w[\w.]*|(?<=  )\.\w+", line) for line in picture.splitlines()]
    names = [f"jaxkv{name}" if name.startswith(".") else name for line in lines for name in line]
    return tuple(reversed(names))


def test_the_picture_of_the_architecture_has_every_wing_at_its_place():
    assert read_picture((ROOT / "ARCHITECTURE.md").read_text()) == WINGS


def test_wings_import_only_what_stands_below_them():
    assert len(pallas_kernels.__path__) == 1
    assert not list(misplaced(modules()))


def floors(sources, folder):
    """How many modules of one folder stand on each other."""
    inside = {m for m in sources if m.rpartition(".")[0] == folder}
    needs = {m: {n if n in inside else n.rpartition(".")[0] for n in imports(sources[m])} & inside for m in inside}

    def height(module):
        return 1 + max((height(other) for other in needs[module] - {module}), default=0)

    return max(map(height, inside), default=0)


@pytest.mark.parametrize("folder", sorted({m.rpartition(".")[0] for m in modules()} - {""}))
def test_folders_stay_small(folder):
    sources = modules()
    packages = {m.rpartition(".")[0] for m in sources}
    assert sum(m.rpartition(".")[0] == folder and m not in packages for m in sources) <= 14
    assert floors(sources, folder) <= 6


def test_what_jax_has_no_public_name_for_is_asked_for_in_one_module():
    found = {m for m, text in modules().items() if "jax._src" in text or '"_trace"' in text}
    assert found == {"jaxkv._core.state.jax_internals"}


TWICE = {"Attention"}  # a public name of two modules


def test_no_class_has_the_name_of_another():
    places = {}
    for module, source in modules().items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, set()).add(module)
    assert {name: found for name, found in places.items() if len(found) > 1 and name not in TWICE} == {}


def test_nothing_is_called_one():
    """A layer is `layer`, a row `row`: what is one of many has a name."""
    found = set()
    for module, source in modules().items():
        for node in ast.walk(ast.parse(source)):
            name = node.id if isinstance(node, ast.Name) else node.arg if isinstance(node, ast.arg) else None
            if name == "one":
                found.add((module, node.lineno))
    assert found == set()


def test_no_circles():
    packages = {module for module in modules() if (ROOT / pathlib.Path(*module.split(".")) / "__init__.py").exists()}
    assert not circles({m: s for m, s in modules().items() if m not in packages})


def test_planted_imports_are_found():
    planted = {
        "jaxkv._core.blocks.tables": "def f():\n    from jaxkv._engine.frontend.engine import Engine\n",
        "pallas_kernels.common.ragged_layout": "import jaxkv\n",
    }
    found = list(misplaced(modules() | planted))
    assert sorted(found) == [
        ("jaxkv._core.blocks.tables", "jaxkv._engine.frontend.engine.Engine"),
        ("pallas_kernels.common.ragged_layout", "jaxkv"),
    ]  # fmt: skip
    loop = {"a": "import b", "b": "from c import d", "c": "import a", "beside": "import a"}
    assert circles(loop).keys() == loop.keys()


def test_no_two_test_files_have_one_name():
    """pytest tells files apart by that alone, and finds it out where all are run."""
    names = sorted(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, following in itertools.pairwise(names) if name == following] == []
