# SPDX-License-Identifier: Apache-2.0
"""Rules on what the package's code may do, each a function from a module's tree to its findings."""

import ast
from collections.abc import Iterator

from tests.conventions.sources import Finding

BROAD = {"Exception", "BaseException"}
UNSAFE_MODULES = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
UNSAFE_CALLS = {"eval", "exec"}
PATCHERS = {"unittest.mock", "mock"}


def swallowed_exceptions(tree: ast.Module) -> Iterator[Finding]:
    """Handlers that catch everything, and those that catch nearly everything and do nothing."""
    for node in ast.walk(tree):
        match node:
            case ast.ExceptHandler(type=None):
                yield Finding(node.lineno, "bare `except:`, which also catches cancellation")
            case ast.ExceptHandler(type=caught, body=body) if _is_broad(caught) and _is_empty(body):
                yield Finding(node.lineno, f"`except {ast.unparse(caught)}` that hides the error")
            case ast.Call(func=ast.Name(id="suppress") | ast.Attribute(attr="suppress"), args=args):
                if any(_is_broad(each) for each in args):
                    yield Finding(node.lineno, f"`{ast.unparse(node)}` hides every error")


def unsafe_code(tree: ast.Module) -> Iterator[Finding]:
    """Whatever lets data become code: pickle and its kin, `eval`, `exec`, unrestricted loads."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                modules = [alias.name for alias in names]
            case ast.ImportFrom(module=str(module), level=0, names=names):
                modules = [module, *(f"{module}.{alias.name}" for alias in names)]
            case ast.Call():
                modules = []
                if (message := _unsafe_call(node)) is not None:
                    yield Finding(node.lineno, message)
            case _:
                continue
        for module in modules:
            if module.partition(".")[0] in UNSAFE_MODULES:
                yield Finding(node.lineno, f"imports {module}")
                break
            if module in PATCHERS:
                yield Finding(node.lineno, f"imports {module}, which is for tests")
                break


def attribute_probes(tree: ast.Module) -> Iterator[Finding]:
    """`getattr(x, "name", default)` and `hasattr(x, "name")`: guessing at what an object is."""
    for node in ast.walk(tree):
        match node:
            case (
                ast.Call(func=ast.Name(id="getattr"), args=[_, ast.Constant(value=str()), _])
                | ast.Call(func=ast.Name(id="hasattr"), args=[_, ast.Constant(value=str())])
            ):
                yield Finding(node.lineno, ast.unparse(node))


def _is_broad(caught: ast.expr | None) -> bool:
    match caught:
        case ast.Tuple(elts=each):
            return any(_is_broad(one) for one in each)
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name in BROAD
    return False


def _is_empty(body: list[ast.stmt]) -> bool:
    """Whether a handler's body does nothing: pass, continue, `...` or a docstring."""
    return all(
        isinstance(each, ast.Pass | ast.Continue)
        or (isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant))
        for each in body
    )


def _unsafe_call(node: ast.Call) -> str | None:
    options = {each.arg: each.value for each in node.keywords}
    match node.func:
        case ast.Name(id=name) if name in UNSAFE_CALLS:
            return f"calls {name}()"
        case ast.Attribute(value=ast.Name(id="torch"), attr="load"):
            if not _is_constant(options.get("weights_only"), True):
                return "torch.load() without weights_only=True runs what the file says"
        case ast.Attribute(value=ast.Name(id="np" | "numpy"), attr="load"):
            if "allow_pickle" in options and not _is_constant(options["allow_pickle"], False):
                return "numpy.load(allow_pickle=True) runs what the file says"
    return None


def _is_constant(node: ast.expr | None, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value
