"""Plants known mistakes in a package, for the tests that check that other tests notice them.

A plant names its target by *symbol* and by a piece of the syntax tree inside of it, never by a file or by text:

    Plant("Loop._plan", "a < b", "a <= b")

`symbol` is a top-level function or constant, a class, a `Class.method`, or a function inside of another
(`prefill.step`). It is looked up in all modules of the package, so a module may be moved or split. Where several
modules have such a symbol, the one that holds `right` is meant; if that does not decide, write the end of the module's
name first, as in `gpu.decode:attend`.

`right` is an expression, or one or several whole statements; `wrong` is put in its place. An empty `wrong` drops the
statements. Both are compared as syntax trees: line breaks, quotes, brackets and comments do not matter. A body `...`
stands for any statements: `if is_lost: ...` becomes `if False: ...`. `right` must be found `times` times (once unless
said otherwise), and all of them are replaced. Code in which only names have changed is still found, if half of the
names are the same and no other place fits as well; `wrong` then takes the new names.

To add a mistake: write the line that you want to break as `right`, the broken one as `wrong`, and as `symbol` the
function that it stands in. The test by day (`test_every_mistake_can_be_made`) says what does not fit.
"""

import ast
import collections
import copy
import functools
import importlib
import pathlib
import shutil
import sys
import types
from collections.abc import Mapping
from typing import NamedTuple

NAMES = {ast.Name: "id", ast.Attribute: "attr", ast.arg: "arg", ast.keyword: "arg", ast.FunctionDef: "name"}


class Plant(NamedTuple):
    symbol: str
    right: str
    wrong: str
    times: int = 1


class PlantError(AssertionError):
    """A mistake cannot be planted as it is written: the code has changed."""


class Sources:
    """The modules of a package as text: its folder, and the name that its modules begin with."""

    def __init__(self, folder: pathlib.Path, package: str):
        self.folder, self.package = folder, package
        self.files = {}
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            self.files[".".join((package, *parts)).removesuffix(".__init__")] = path

    @functools.cached_property
    def trees(self) -> dict[str, ast.Module]:
        return {name: ast.parse(path.read_text()) for name, path in self.files.items()}

    @functools.cached_property
    def symbols(self) -> dict[str, list[str]]:
        """The modules that have a symbol."""
        found: dict[str, list[str]] = {}
        for module, tree in self.trees.items():
            for symbol in symbols_of(tree):
                found.setdefault(symbol, []).append(module)
        return found

    def module_of(self, plant: Plant) -> str:
        """Returns the one module in which `plant` fits."""
        prefix, _, symbol = plant.symbol.rpartition(":")
        modules = [m for m in self.symbols.get(symbol, ()) if f".{m}".endswith(f".{prefix}") or not prefix]
        if not modules:
            raise PlantError(f"nothing is named {plant.symbol!r}: {plant}")
        if len(modules) == 1:
            return modules[0]
        for renamed in (False, True):
            fits = [m for m in modules if find(symbols_of(self.trees[m])[symbol], plant, renamed)]
            if len(fits) == 1:
                return fits[0]
        raise PlantError(f"{plant.symbol!r} is in {modules}, of which {fits or 'none'} have it: {plant}")

    def broken(self, *plants: Plant) -> dict[str, ast.Module]:
        """Returns the new syntax tree of each module that `plants` change. Raises `PlantError` if one does not fit."""
        changed: dict[str, ast.Module] = {}
        for plant in plants:
            module = self.module_of(plant)
            if module not in changed:
                changed[module] = ast.parse(self.files[module].read_text())
            put(changed[module], plant)
        return changed

    def check_plants(self, mistakes: Mapping[str, tuple]) -> None:
        """Asserts that the plants of each mistake fit, whatever else stands beside them."""
        for name, mistake in mistakes.items():
            assert self.broken(*(part for part in mistake if isinstance(part, Plant))), name

    def planted(self, *plants: Plant) -> dict[str, str]:
        """Returns the new source of each module that `plants` change."""
        return {module: ast.unparse(ast.fix_missing_locations(tree)) for module, tree in self.broken(*plants).items()}

    def write_copy(self, folder: pathlib.Path, name: str, *plants: Plant) -> None:
        """Writes the package into a folder under another name, with `plants` in it."""
        shutil.copytree(self.folder, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        planted = self.planted(*plants)
        for module, path in self.files.items():
            text = planted.get(module, path.read_text()).replace(self.package, name)
            (folder / name / path.relative_to(self.folder)).write_text(text)


def symbols_of(tree: ast.AST, prefix: str = "") -> dict[str, ast.AST]:
    """Returns the functions, classes and module-level constants below `tree` by their qualified names."""
    found: dict[str, ast.AST] = {}
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[prefix + node.name] = node
            found |= symbols_of(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.stmt) and not isinstance(node, ast.Assign | ast.AnnAssign):
            found |= symbols_of(node, prefix)
        elif not prefix and isinstance(node, ast.Assign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                found |= {name.id: node for name in ast.walk(target) if isinstance(name, ast.Name)}
    return found


class Bound(NamedTuple):
    """What stands in a place for names of the pattern, if they may differ, and for its bodies `...`."""

    names: dict[str, str] | None
    bodies: list[list[ast.stmt]]


class Place(NamedTuple):
    """Where something was found: `holder.field`, at one index or over a slice of it."""

    holder: ast.AST
    field: str
    index: int | slice | None
    bound: Bound

    @property
    def share_of_same_names(self) -> float:
        same = [a == b for a, b in (self.bound.names or {}).items()]
        return sum(same) / len(same) if same else 1.0

    def put(self, new: ast.expr | list[ast.stmt]) -> None:
        new = copy.deepcopy(new)
        for node in new if isinstance(new, list) else [new]:
            Filling(self.bound).visit(node)
        held = getattr(self.holder, self.field)
        if self.index is None:
            setattr(self.holder, self.field, new)
            return
        held[self.index] = new
        if not held and self.field in ("body", "finalbody"):
            held.append(ast.Pass())


class Filling(ast.NodeVisitor):
    """Puts what was bound into a new piece of code."""

    def __init__(self, bound: Bound):
        self.names, self.bodies = bound.names or {}, iter(bound.bodies)

    def generic_visit(self, node: ast.AST) -> None:
        field = NAMES.get(type(node))
        if field:
            setattr(node, field, self.names.get(getattr(node, field), getattr(node, field)))
        if is_any_body(getattr(node, "body", None)):
            node.body = next(self.bodies)
        super().generic_visit(node)


def is_any_body(body) -> bool:
    return isinstance(body, list) and [ast.unparse(x) for x in body] == ["..."]


@functools.cache
def parsed(right: str, wrong: str) -> tuple[ast.expr | list[ast.stmt], ast.expr | list[ast.stmt]]:
    """Returns both as expressions if both are, else as lists of statements."""
    try:
        return ast.parse(right, mode="eval").body, ast.parse(wrong, mode="eval").body
    except SyntaxError:
        return ast.parse(right).body, ast.parse(wrong).body


def is_alike(wanted, node, bound: Bound) -> bool:
    """Whether `node` is `wanted`; fills `bound`."""
    if isinstance(wanted, list):
        if is_any_body(wanted):
            bound.bodies.append(node)
            return True
        return len(wanted) == len(node) and all(map(functools.partial(is_alike, bound=bound), wanted, node))
    if not isinstance(wanted, ast.AST):
        return type(wanted) is type(node) and wanted == node
    if type(wanted) is not type(node):
        return False
    for field in wanted._fields:
        a, b = getattr(wanted, field, None), getattr(node, field, None)
        if field == NAMES.get(type(wanted)) and bound.names is not None and a and b:
            if bound.names.setdefault(a, b) != b:
                return False
        elif field != "ctx" and not is_alike(a, b, bound):
            return False
    return True


def find(symbol: ast.AST, plant: Plant, renamed: bool = False) -> list[Place]:
    """Returns the places inside of `symbol` that are `plant.right`, up to names if they may be `renamed`."""
    wanted, _ = parsed(plant.right, plant.wrong)
    found = []

    def look(node, *place):
        first, own = (wanted[0], node[0]) if isinstance(wanted, list) else (wanted, node)
        if type(first) is not type(own):
            return
        bound = Bound({} if renamed else None, [])
        if is_alike(wanted, node, bound):
            found.append(Place(*place, bound))

    for holder in ast.walk(symbol):
        for field, held in ast.iter_fields(holder):
            if isinstance(wanted, list) and isinstance(held, list):
                for i in range(len(held) - len(wanted) + 1):
                    look(held[i : i + len(wanted)], holder, field, slice(i, i + len(wanted)))
            elif isinstance(held, list):
                for i, node in enumerate(held):
                    look(node, holder, field, i)
            elif not isinstance(wanted, list):
                look(held, holder, field, None)
    if renamed:
        best = max((place.share_of_same_names for place in found), default=0)
        found = [place for place in found if place.share_of_same_names == best >= 0.5]
    return found


def put(tree: ast.Module, plant: Plant) -> None:
    """Changes `tree`. Raises `PlantError` if `plant` does not fit it."""
    if plant.right == plant.wrong:
        raise PlantError(f"nothing would change: {plant}")
    symbol = symbols_of(tree)[plant.symbol.rpartition(":")[2]]
    if not isinstance(symbol, ast.FunctionDef | ast.ClassDef):
        symbol = ast.Module([symbol], [])
    places = find(symbol, plant) or find(symbol, plant, renamed=True)
    if len(places) != plant.times:
        raise PlantError(f"found {len(places)} times, not {plant.times}: {plant}")
    for place in reversed(places):
        place.put(parsed(plant.right, plant.wrong)[1])


def plant_in_copy(sources: Sources, *plants: Plant) -> tuple[types.ModuleType, types.ModuleType]:
    """Returns the one module that `plants` change, and a copy of it with them."""
    ((name, source),) = sources.planted(*plants).items()
    module = importlib.import_module(name)
    broken = types.ModuleType(f"{name}_broken")
    sys.modules[broken.__name__] = broken  # dataclasses look their module up
    exec(compile(source, f"{name} with {plants}", "exec"), broken.__dict__)
    return module, broken


def find_tests(folder: pathlib.Path) -> dict[str, list[str]]:
    """Returns where the tests below `folder` are, by the names of folders, files, functions and `file::function`."""
    found = collections.defaultdict(list)
    for path in folder.iterdir():
        if path.is_dir():
            found[path.name].append(str(path))
    for path in folder.rglob("test_*.py"):
        found[path.name].append(str(path))
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                for name in (node.name, f"{path.name}::{node.name}"):
                    found[name].append(f"{path}::{node.name}")
    return found
