"""Checks that ranks, which run the job's file again, train the job on which `start()` was called.

Ranks have the file's `job`, its functions, and the global variables as the file's top level sets them. A program that
starts several jobs, with other functions or other values, would otherwise train the file's own job each time.
"""

import ast
import contextlib
import dis
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from elche.errors import InvalidJob
from elche.settings import SETTINGS
from elche_worker.user.job import JobDefinition

WAY_OUT = "make it depend on a setting or an environment variable, or use job.run()"


def check_is_of_file(job: JobDefinition) -> None:
    """Raises `InvalidJob` if the file's `job`, which the ranks train, has other functions, or if its functions read
    global variables that the program has changed since.
    """
    module = sys.modules.get(getattr(innermost(job.train_step), "__module__", ""))
    defined = getattr(module, "job", None)
    if module is None or not isinstance(defined, JobDefinition):
        return
    own = [field.name for field in fields(job) if not has_text(field.name, getattr(job, field.name))]
    for name in own:
        if not _are_alike(getattr(job, name), getattr(defined, name)):
            raise InvalidJob(
                f"job.start() runs the `job` of its file, and this one has another {name}: its ranks would train "
                "with that of the file. Call start() on the file's `job`, with other plain settings by "
                f"dataclasses.replace; for the rest, {WAY_OUT}"
            )
    try:
        tree = ast.parse(inspect.getsource(module))
    except (OSError, SyntaxError, TypeError):  # a notebook's cell: what it uses from other cells is refused elsewhere
        return
    for name in _globals_of([getattr(job, name) for name in own], module):
        if _has_changed(name, tree, module):
            raise InvalidJob(
                f"job.start() runs its file again on each rank, and the job's functions read {name}, which this "
                f"program has set since: the ranks would have the value of the file's top level. So {WAY_OUT}"
            )


def has_text(name: str, value: object) -> bool:
    """True for a setting whose value the ranks get as an option's text; others they have from the file."""
    return name in SETTINGS and SETTINGS[name].unparse(value) is not None


def innermost(function: Callable[..., Any]) -> Callable[..., Any]:
    """The user's function inside decorators and `functools.partial`."""
    inner = inspect.unwrap(function)
    return innermost(inner.func) if isinstance(inner, functools.partial) else inner


def _are_alike(one: Any, other: Any) -> bool:
    """True for equal plain values, and for data classes and functions alike in all that they hold."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    match one:
        case bool() | int() | float() | complex() | str() | bytes() | set() | frozenset():
            return bool(one == other)
        case tuple() | list():
            return len(one) == len(other) and all(map(_are_alike, one, other))
        case dict():
            return list(one) == list(other) and all(map(_are_alike, one.values(), other.values()))
        case functools.partial():
            return _are_alike([one.func, one.args, one.keywords], [other.func, other.args, other.keywords])
        case MethodType():
            return _are_alike([one.__func__, one.__self__], [other.__func__, other.__self__])
        case CellType():
            return _are_alike(_content(one), _content(other))
        case FunctionType():
            beside = [[f.__defaults__, f.__kwdefaults__, list(f.__closure__ or ())] for f in (one, other)]
            return one.__code__ == other.__code__ and _are_alike(*beside)
        case _ if is_dataclass(one) and not isinstance(one, type):
            return all(_are_alike(getattr(one, field.name), getattr(other, field.name)) for field in fields(one))
        case _:
            return False


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a variable that has no value yet
        return None


def _globals_of(values: list[Any], module: ModuleType) -> list[str]:
    """The module's variables that these functions read, directly or through other functions and classes of the module.
    Those that one of them sets, such as counters and caches, are left out.
    """
    read: set[str] = set()
    written: set[str] = set()
    codes, seen = [code for value in values for code in _codes_of(value)], set()
    while codes:
        code = codes.pop()
        if code in seen:
            continue
        seen.add(code)
        codes += [one for one in code.co_consts if isinstance(one, CodeType)]
        written |= _set_by(code)
        for name in set(code.co_names) & vars(module).keys() - read:
            read.add(name)
            value = vars(module)[name]
            if getattr(value, "__module__", None) == module.__name__:
                codes += _codes_of(value)
    return sorted(read - written)


def _set_by(code: CodeType) -> set[str]:
    """The names that a function's code sets as global variables."""
    return {one.argval for one in dis.get_instructions(code) if one.opname in ("STORE_GLOBAL", "DELETE_GLOBAL")}


def _codes_of(value: Any) -> Iterator[CodeType]:
    """The code of a function, or of all methods of a class."""
    match innermost(value) if callable(value) else value:
        case MethodType() as method:
            yield from _codes_of(method.__func__)
        case FunctionType() as function:
            yield function.__code__
        case type() as kind:
            for one in vars(kind).values():
                yield from _codes_of(getattr(one, "__func__", one)) if not isinstance(one, type) else ()


def _has_changed(name: str, tree: ast.Module, module: ModuleType) -> bool:
    """True if the variable has, or may have, another value than the file's top level gives it; also if the program's
    own part (`if __name__ == "__main__"`) assigns to it.
    """
    at_top = [one for one in tree.body if not _is_main(one) and name in _assigned(one)]
    if not at_top:
        return False
    match at_top[-1]:
        case ast.Assign(targets=[ast.Name()], value=value) | ast.AnnAssign(value=ast.expr() as value):
            with contextlib.suppress(ValueError):
                literal = ast.literal_eval(value)
                # An empty container is a cache; one that the top level uses may have been filled there.
                may_be_filled = isinstance(literal, list | dict | set) and (not literal or _is_read(name, tree))
                return not may_be_filled and not _are_alike(literal, vars(module)[name])
    return any(name in _assigned(one) for one in tree.body if _is_main(one))


def _is_read(name: str, tree: ast.Module) -> bool:
    """True if the file's top level reads the variable, outside of functions and classes."""
    return any(name in _names(one, ast.Load) for one in tree.body if not _is_main(one))


def _is_main(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.If) and "__name__" in {
        one.id for one in ast.walk(statement.test) if isinstance(one, ast.Name)
    }


def _assigned(statement: ast.stmt) -> set[str]:
    """The names to which the statement, or a statement in it, assigns, outside of functions and classes."""
    return _names(statement, ast.Store)


def _names(statement: ast.stmt, use: type[ast.expr_context]) -> set[str]:
    found: set[str] = set()
    nodes: list[ast.AST] = [statement] if not isinstance(statement, (ast.FunctionDef, ast.ClassDef)) else []
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Name) and isinstance(node.ctx, use):
            found.add(node.id)
        apart = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda | ast.comprehension
        nodes += [one for one in ast.iter_child_nodes(node) if not isinstance(one, apart)]
    return found
