"""A wing of `jaxkv` imports only wings that stand above it in this list, and no file is imported in a circle."""

import ast
import itertools
import pathlib

import jaxkv
import pallas_kernels

WINGS = ("pallas_kernels", "_core", "_files", "_tiers", "_engine", "_cli")
ROOT = pathlib.Path(jaxkv.__file__).parents[1]
BACKENDS = ("xla", "gpu", "tpu")


def imports(source):
    """The modules that a source file names, inside functions too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports name the whole path"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def wing_of(module):
    """The place of a module in `WINGS`; None for what stands beside them."""
    first, second, *_ = (*module.split("."), "")
    if first == "pallas_kernels":
        return 0
    return WINGS.index(second) if first == "jaxkv" and second in WINGS else None


def misplaced(sources):
    """`(module, what it imports)` for each import of a wing that stands further down."""
    for module, source in sources.items():
        here = wing_of(module)
        for name in imports(source):
            there = wing_of(name)
            if (name.split(".")[0] == "jaxkv" and here == 0) or (None not in (here, there) and there > here):
                yield module, name


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


def test_wings_import_only_what_stands_above_them():
    assert len(pallas_kernels.__path__) == 1
    assert not list(misplaced(modules()))


def test_no_circles():
    packages = {module for module in modules() if (ROOT / pathlib.Path(*module.split(".")) / "__init__.py").exists()}
    assert not circles({m: s for m, s in modules().items() if m not in packages})


def test_planted_imports_are_found():
    planted = {
        "jaxkv._core.tables": "def f():\n    from jaxkv._engine.engine import Engine\n",
        "pallas_kernels.tokens": "import jaxkv\n",
    }
    found = list(misplaced(modules() | planted))
    assert sorted(found) == [
        ("jaxkv._core.tables", "jaxkv._engine.engine.Engine"), ("pallas_kernels.tokens", "jaxkv"),
    ]  # fmt: skip
    loop = {"a": "import b", "b": "from c import d", "c": "import a", "beside": "import a"}
    assert circles(loop).keys() == loop.keys()


def test_no_two_test_files_have_one_name():
    """pytest tells files apart by that alone, and finds it out where all are run."""
    names = sorted(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, following in itertools.pairwise(names) if name == following] == []
