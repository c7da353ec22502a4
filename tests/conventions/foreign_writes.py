# SPDX-License-Identifier: Apache-2.0
"""Find assignments into what another package owns.

We extend vLLM, transformers and diffusers by subclassing and by their registration points. An
attribute set on one of their modules or classes would work today and break without a sign on their
next release, and for whoever else uses them in the same process.

The checker resolves names as Python's scopes do: an import binds a name to a foreign object, a
parameter or another assignment of the same name hides it, and `alias = torch.cuda` passes it on.
Objects we make or are given (`self`, instances, arguments) are ours to set attributes on.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.conventions.sources import PACKAGE, Finding

OUR_PACKAGES = {PACKAGE}
WRITABLE_MAPPINGS = {
    "os.environ",
    # vLLM's registry of a benchmark's request functions: callables of a published protocol by name.
    # Its command line offers what is in it, its loop looks names up in it; we only add names.
    "vllm.benchmarks.lib.endpoint_request_func.ASYNC_REQUEST_FUNCS",
}
SETTERS = {"setattr", "delattr"}
SETTER_METHODS = {"__setattr__", "__delattr__"}
MAPPING_MUTATORS = {"update", "setdefault", "pop", "popitem", "clear", "__setitem__", "__delitem__"}
IMPORTERS = {"import_module", "__import__"}
CLASS_ATTRIBUTES = {"__class__", "__bases__"}

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
ScopeNode = ast.Module | ast.ClassDef | FunctionNode


@dataclass(slots=True)
class _Scope:
    """The names one scope binds: to the dotted path of a foreign object, or to None."""

    node: ScopeNode
    names: dict[str, str | None] = field(default_factory=dict)

    @property
    def is_class(self) -> bool:
        return isinstance(self.node, ast.ClassDef)


def foreign_writes(tree: ast.Module) -> list[Finding]:
    """Every write in `tree` whose target belongs to another package."""
    checker = _Checker()
    checker.visit(tree)
    return checker.findings


class _Checker(ast.NodeVisitor):
    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self._scopes: list[_Scope] = []

    def _enter(self, node: ScopeNode) -> None:
        scope = _Scope(node)
        self._scopes.append(scope)
        _bind(scope, self._origin)
        self.generic_visit(node)
        self._scopes.pop()

    visit_Module = visit_ClassDef = visit_FunctionDef = visit_AsyncFunctionDef = visit_Lambda = (
        _enter
    )

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if not isinstance(node.ctx, ast.Load):
            if node.attr in CLASS_ATTRIBUTES:
                self._report(node, f"assigns {ast.unparse(node)}")
            else:
                self._check_object(node, node.value, f".{node.attr}")
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        if not isinstance(node.ctx, ast.Load):
            namespace = _namespace_owner(node.value)
            if namespace is not None:
                self._check_object(node, namespace, "'s namespace")
            elif self._origin(node.value) not in WRITABLE_MAPPINGS:
                self._check_object(node, node.value, "[...]")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        target = _setter_target(node)
        if target is not None:
            if _names_class_attribute(node):
                self._report(node, f"assigns an object's class: {ast.unparse(node)}")
            else:
                self._check_object(node, target, f" through {ast.unparse(node.func)}()")
        self.generic_visit(node)

    def _check_object(self, node: ast.expr, target: ast.expr, what: str) -> None:
        """Report `node` if it writes to `target` and that is another package's."""
        origin = self._origin(target)
        if origin is not None:
            self._report(node, f"writes {origin}{what}")
        elif _is_others_class(target):
            self._report(node, f"writes {ast.unparse(target)}{what}, a class that may not be ours")

    def _report(self, node: ast.expr, message: str) -> None:
        self.findings.append(Finding(node.lineno, message))

    def _origin(self, node: ast.expr) -> str | None:
        """The dotted path of the foreign object that `node` evaluates to, as far as one can see."""
        match node:
            case ast.Name(id=name):
                return self._lookup(name)
            case ast.Attribute(value=value, attr=attr):
                parent = self._origin(value)
                return parent and f"{parent}.{attr}"
            case ast.Subscript(value=value) if self._origin(value) == "sys.modules":
                return f"sys.modules[{ast.unparse(node.slice)}]"
            case ast.Call(func=func, args=[ast.Constant(value=str(module)), *_]) if _last_name(
                func
            ) in IMPORTERS and _is_foreign(module):
                return module
        return None

    def _lookup(self, name: str) -> str | None:
        for depth, scope in enumerate(reversed(self._scopes)):
            hidden = scope.is_class and depth > 0  # a method does not see its class's names
            if name in scope.names and not hidden:
                return scope.names[name]
        return None


def _bind(scope: _Scope, origin_of) -> None:
    """Fill `scope.names`. Imports win over assignments, for `try: import x / except: x = None`."""
    names = scope.names
    declared_elsewhere: set[str] = set()
    imports: dict[str, str | None] = {}
    if isinstance(scope.node, FunctionNode):
        for argument in ast.walk(scope.node.args):
            if isinstance(argument, ast.arg):
                names[argument.arg] = None
    for node in _statements_of(scope.node):
        match node:
            case ast.Import() | ast.ImportFrom():
                imports.update(_imported_names(node))
            case ast.Global() | ast.Nonlocal():
                declared_elsewhere.update(node.names)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                names[node.name] = None
            case ast.Name(id=name, ctx=ast.Store()):
                names.setdefault(name, None)
    names.update(imports)
    for node in _statements_of(scope.node):
        for name, value in _aliases(node):
            if names.get(name) is None and (origin := origin_of(value)) is not None:
                names[name] = origin
    for name in declared_elsewhere - imports.keys():
        names.pop(name, None)


def _statements_of(scope: ScopeNode) -> Iterator[ast.AST]:
    """Every node of `scope` itself, without those of the scopes inside it."""
    body = scope.body if isinstance(scope.body, list) else [scope.body]
    pending: list[ast.AST] = list(reversed(body))
    while pending:
        node = pending.pop()
        yield node
        if not isinstance(node, ScopeNode):
            pending.extend(reversed(list(ast.iter_child_nodes(node))))


def _imported_names(node: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, str | None]]:
    for alias in node.names:
        if isinstance(node, ast.ImportFrom):
            path = "." * node.level + f"{node.module or ''}.{alias.name}"
            name = alias.asname or alias.name
        else:
            path = alias.name if alias.asname else alias.name.partition(".")[0]
            name = alias.asname or path
        yield name, path if _is_foreign(path) else None


def _aliases(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """The plain renamings in `node`: `a = b.c`, `(a := b.c)` and `for a in (b.c, d)`."""
    match node:
        case ast.Assign(targets=targets, value=value):
            yield from ((each.id, value) for each in targets if isinstance(each, ast.Name))
        case (
            ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
            | ast.NamedExpr(target=ast.Name(id=name), value=value)
        ):
            yield name, value
        case ast.For(target=ast.Name(id=name), iter=ast.Tuple(elts=values) | ast.List(elts=values)):
            yield from ((name, value) for value in values)


def _is_foreign(path: str) -> bool:
    return not path.startswith(".") and path.partition(".")[0] not in OUR_PACKAGES


def _last_name(node: ast.expr) -> str | None:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return None


def _namespace_owner(node: ast.expr) -> ast.expr | None:
    """`x` where `node` is `vars(x)` or `x.__dict__`."""
    match node:
        case ast.Call(func=ast.Name(id="vars"), args=[owner]):
            return owner
        case ast.Attribute(value=owner, attr="__dict__"):
            return owner
    return None


def _setter_target(node: ast.Call) -> ast.expr | None:
    """What a call such as `setattr(x, ...)` or `vars(x).update(...)` writes to."""
    match node:
        case ast.Call(func=ast.Name(id=name), args=[target, *_]) if name in SETTERS:
            return target
        case ast.Call(
            func=ast.Attribute(value=ast.Name(id="object" | "type"), attr=name), args=[target, *_]
        ) if name in SETTER_METHODS:
            return target
        case ast.Call(func=ast.Attribute(value=target, attr=name)) if name in SETTER_METHODS:
            return target
        case ast.Call(func=ast.Attribute(value=namespace, attr=name)) if name in MAPPING_MUTATORS:
            return _namespace_owner(namespace)
    return None


def _names_class_attribute(node: ast.Call) -> bool:
    return any(
        isinstance(each, ast.Constant) and each.value in CLASS_ATTRIBUTES for each in node.args
    )


def _is_others_class(node: ast.expr) -> bool:
    """Whether `node` is `type(x)` or `x.__class__` of anything but `self`."""
    match node:
        case (
            ast.Call(func=ast.Name(id="type"), args=[of])
            | ast.Attribute(value=of, attr="__class__")
        ):
            return not (isinstance(of, ast.Name) and of.id == "self")
    return False
