"""The architecture by its imports: modules, dependencies, pure modules, and circles of packages.

`python -m tests.imports` prints the modules by package.
"""

import ast
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("kvstate", "extproc", "kvtools")

# The product; the simulator, which tests it, is separate.
MEASURED = ("kvstate", "extproc", "kvtools")
SIMULATOR = "kvtools.simulator"

# Compiled, and pure as well: their sources in the folders `native` include nothing that does I/O.
COMPILED = {"kvstate._core", "extproc._core"}

# Packages that a pure module may import besides pure modules and the standard library.
LIBRARIES = {"msgspec", "xxhash", "google", "yaml", "prometheus_client"}
LIBRARIES |= {"envoy_data_plane", "betterproto2"}

# Parts of the standard library that bring in a clock, a socket, an event loop or chance.
IMPURE_STANDARD_LIBRARY = {"asyncio", "socket", "time", "random", "threading", "subprocess", "os"}


def name_of(path: Path) -> str:
    """The dotted name of a module."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


MODULES = {
    name_of(path): path
    for package in PACKAGES
    for path in sorted((ROOT / package).rglob("*.py"))
    if not {"pb", "build"} & set(path.parts)
}


@cache
def tree_of(module: str) -> ast.Module:
    """The syntax tree of a module."""
    return ast.parse(MODULES[module].read_text())


def imports_of(module: str) -> frozenset[str]:
    """Full names of what a module imports, inside its functions too."""
    return imports_in(MODULES[module])


def imports_in(file: Path) -> frozenset[str]:
    """Full names of what a file of Python imports."""
    return _read(file)[0]


@cache
def _read(file: Path) -> tuple[frozenset[str], bool]:
    """What a file imports, and whether anything in it waits."""
    imported: set[str] = set()
    waits = False
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            imported.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative imports hide the layers"
            imported.update(_imported(node.module or "", alias.name) for alias in node.names)
        elif isinstance(node, (ast.Await, ast.AsyncFor, ast.AsyncWith)):
            waits = True
    return frozenset(imported), waits


def _imported(module: str, name: str) -> str:
    """The module of that name, if it is one, or else the module that it is imported from."""
    inside = ROOT / module.replace(".", "/") / name
    is_module = inside.is_dir() or inside.with_suffix(".py").is_file()
    return f"{module}.{name}" if is_module else module


def importers_of(package: str) -> set[str]:
    """The modules that import a package or library, or something inside of it."""
    return {
        name
        for name in MODULES
        if any(one == package or one.startswith(f"{package}.") for one in imports_of(name))
    }


@cache
def pure_modules() -> frozenset[str]:
    """The modules that use no await, clock, socket or chance, neither themselves nor by imports."""
    pure = {name for name in MODULES if not any(impurities(name))}
    while True:
        kept = {name for name in pure if _ours(imports_of(name)) <= pure}
        if kept == pure:
            return frozenset(pure)
        pure = kept


def impurities(module: str) -> Iterator[str]:
    """The reasons why a module is not pure by itself."""
    if _read(MODULES[module])[1]:
        yield "waits"
    for imported in imports_of(module):
        top = imported.partition(".")[0]
        if top in PACKAGES:
            continue
        is_standard = top in sys.stdlib_module_names
        if top in IMPURE_STANDARD_LIBRARY or not (is_standard or top in LIBRARIES):
            yield f"imports {imported}"


def _ours(imported: Iterable[str]) -> set[str]:
    """The project's modules among the imported ones, except generated and compiled ones."""
    return {
        name
        for name in imported
        if name.partition(".")[0] in PACKAGES and ".pb" not in name and name not in COMPILED
    }


def tree() -> str:
    """The modules by package, each with the first sentence of its docstring."""
    lines: list[str] = []
    for name, path in MODULES.items():
        if is_measured(name) and (path.name != "__init__.py" or name.count(".") < 2):
            text = (ast.get_docstring(tree_of(name)) or "").partition("\n\n")[0]
            lines.append(f"- `{name}`: {' '.join(text.split())}")
    return "\n".join(lines)


def is_measured(module: str) -> bool:
    """Whether a module is a part of the product."""
    return module.partition(".")[0] in MEASURED and not f"{module}.".startswith(f"{SIMULATOR}.")


def circles_of_packages() -> list[list[str]]:
    """The groups of packages of the product that import each other in circles.

    A module that stands directly in a topmost package counts as a package.
    """
    known = {name: _ours(imports_of(name)) - {name} for name in MODULES if is_measured(name)}
    packages: dict[str, set[str]] = {}
    for name, imported in known.items():
        here = _package_of(name)
        packages.setdefault(here, set()).update({_package_of(one) for one in imported} - {here})
    return _cycles(packages)


def _package_of(module: str) -> str:
    is_package = MODULES[module].name == "__init__.py"
    return module if is_package or module.count(".") == 1 else module.rpartition(".")[0]


def _cycles(known: Mapping[str, set[str]]) -> list[list[str]]:
    """The groups whose members reach each other."""
    reach = {name: _reached(name, known) for name in known}
    groups = {
        tuple(sorted(one for one in reach[name] if name in reach.get(one, ())))
        for name in known
        if name in reach[name]
    }
    return sorted(map(list, groups))


def _reached(name: str, known: Mapping[str, set[str]]) -> set[str]:
    found: set[str] = set()
    waiting = [name]
    while waiting:
        new = known.get(waiting.pop(), set()) - found
        found |= new
        waiting.extend(new)
    return found


if __name__ == "__main__":
    print(tree())
