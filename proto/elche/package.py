"""Files with relative imports (`from .model import Net`), which Python runs as `python -m PACKAGE.MODULE` alone."""

import ast
from pathlib import Path


def package_of(source: str, file_name: str) -> tuple[str, str]:
    """The dotted name of the file's package, and the folder that has the package. Two empty strings for a file without
    relative imports outside of `try`, and for one whose imports climb above the root: it runs as with `python FILE`.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):  # whoever runs it says so; null bytes are a ValueError
        return "", ""
    optional = {id(one) for node in ast.walk(tree) if isinstance(node, ast.Try) for one in ast.walk(node)}
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and id(node) not in optional]
    level = max((node.level for node in imports), default=0)
    if not level:
        return "", ""
    folder = Path(file_name).resolve().parent
    names = [folder.name]
    # The root has no name: it is no package, though an image may have an `__init__.py` there.
    while (folder.parent.name and (folder.parent / "__init__.py").is_file()) or len(names) < level:
        folder = folder.parent
        names.insert(0, folder.name)
    return (".".join(names), str(folder.parent)) if all(names) else ("", "")
