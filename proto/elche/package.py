"""Files that import from their own package, which Python runs as `python -m PACKAGE.MODULE` alone."""

import ast
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path


def package_of(source: str, file_name: str) -> tuple[str, str]:
    """The dotted name of the file's package, and the folder that has the package. Two empty strings for a file that
    does not import from it outside of `try`, as `from .model import Net` or `from package.model import Net` do, and for
    one whose imports climb above the root: it runs as with `python FILE`.
    """
    imports = _imports_of(source)
    level = max((node.level for node in imports if isinstance(node, ast.ImportFrom)), default=0)
    own = folder = Path(file_name).resolve().parent
    names = [folder.name]
    # The root has no name: it is no package, though an image may have an `__init__.py` there.
    while (folder.parent.name and _is_package(folder.parent)) or len(names) < level:
        folder = folder.parent
        names.insert(0, folder.name)
    modules = list(_modules_of(imports))
    if not level and not any(_is_from(folder, module, own) for module in modules):
        return next((found for module in modules if (found := _namespace_of(module, own))), ("", ""))
    return (".".join(names), str(folder.parent)) if all(names) else ("", "")


def needs_root(source: str, package: str) -> bool:
    """True if a file of this package needs the folder that has the package: it imports from folders above its own, or
    by the package's name.
    """
    return "." in package or any(module.split(".")[0] == package for module in _modules_of(_imports_of(source)))


def _imports_of(source: str) -> list[ast.Import | ast.ImportFrom]:
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):  # whoever runs it says so; null bytes are a ValueError
        return []
    optional = {id(one) for node in ast.walk(tree) if isinstance(node, ast.Try) for one in ast.walk(node)}
    nodes = (node for node in ast.walk(tree) if id(node) not in optional)
    return [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]


def _modules_of(imports: list[ast.Import | ast.ImportFrom]) -> Iterator[str]:
    """What absolute imports name: modules, and with `from` perhaps what is in one."""
    for node in imports:
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names)
        elif not node.level and node.module:
            yield from (f"{node.module}.{one.name}" for one in node.names)


def _is_from(top: Path, module: str, own: Path) -> bool:
    """True if the module is one of the package `top` and of nothing that a script in the folder `own` finds beside
    itself. A script in a folder that happens to be named as a package it imports goes on to import that package.
    """
    first, _, rest = module.partition(".")
    is_there = _is_package(own) and first == top.name and bool(rest) and _has(top, rest.split(".")[0])
    return is_there and not _has(own, first)


def _namespace_of(module: str, own: Path) -> tuple[str, str] | None:
    """The package of a file in the folder `own`, and the folder that has it, if the module is of a package around the
    file whose folders lack `__init__.py`, as `src` in `python -m src.train`. Packages that are installed come first.
    """
    first, _, rest = module.partition(".")
    top = next((folder for folder in (own, *own.parents) if folder.name == first), None)
    if top is None or not rest or _has(own, first) or not _has(top, rest.split(".")[0]):
        return None
    installed = PathFinder.find_spec(first)
    if installed is not None and installed.origin is not None:
        return None
    return ".".join(own.relative_to(top.parent).parts), str(top.parent)


def _has(folder: Path, name: str) -> bool:
    return (folder / name).is_dir() or (folder / f"{name}.py").is_file()


def _is_package(folder: Path) -> bool:
    return (folder / "__init__.py").is_file()
