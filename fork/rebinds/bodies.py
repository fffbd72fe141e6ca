"""What stands in the body of one function, and what its names are ever given."""

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

from fork.writes.sources import Function

_FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef
_BINDING = ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Call


class Form(Enum):
    """How a name gets an expression."""

    SAME = "same"  # it is that
    ITEM = "item"  # it is one of what that holds
    HOLDS = "holds"  # it is something that holds that


@dataclass(frozen=True)
class Given:
    """An expression that a name or an attribute gets; of a tuple that is taken apart, `part` is which of how many."""

    node: ast.expr
    form: Form = Form.SAME
    part: tuple[int, int] | None = None


@dataclass
class Body:
    """The body of a function, without the bodies of functions defined inside."""

    nodes: list[ast.AST]
    names: dict[str, list[Given]] = field(default_factory=dict)
    inner: dict[str, _FUNCTION] = field(default_factory=dict)
    returned: list[ast.expr] = field(default_factory=list)
    #: What can bind an attribute, and what can call something.
    bindings: list[_BINDING] = field(default_factory=list)
    calls: list[ast.Call] = field(default_factory=list)


def read_body(function: Function) -> Body:
    """The body of `function`; whoever asks keeps it."""
    node = function.node
    body = Body(list(_walk([node.body] if isinstance(node, ast.Lambda) else node.body)))
    if isinstance(node, ast.Lambda):
        body.returned.append(node.body)
    for each in body.nodes:
        match each:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                body.inner[name] = each
            case ast.Return(value=ast.expr() as value):
                body.returned.append(value)
            case ast.Assign() | ast.AnnAssign() | ast.AugAssign():
                body.bindings.append(each)
            case ast.Call():
                body.bindings.append(each)
                body.calls.append(each)
        for name, given in _given(each):
            body.names.setdefault(name, []).append(given)
    return body


def _walk(nodes: Sequence[ast.AST]) -> Iterator[ast.AST]:
    todo = list(reversed(nodes))
    while todo:
        node = todo.pop()
        yield node
        if not isinstance(node, _FUNCTION | ast.ClassDef):
            todo.extend(reversed(list(ast.iter_child_nodes(node))))


def pairs(target: ast.expr, value: ast.expr, form: Form = Form.SAME) -> Iterator[tuple[ast.expr, Given]]:
    """Each single target of an assignment with what it gets."""
    if not isinstance(target, ast.Tuple | ast.List):
        yield target.value if isinstance(target, ast.Starred) else target, Given(value, form)
        return
    count = len(target.elts)
    parts = value.elts if isinstance(value, ast.Tuple | ast.List) else []
    for index, each in enumerate(target.elts):
        if len(parts) == count:
            yield from pairs(each, parts[index], form)
        else:
            for inner, given in pairs(each, value, form):
                yield inner, Given(given.node, form, (index, count) if inner is each else None)


def _given(node: ast.AST) -> Iterator[tuple[str, Given]]:
    match node:
        case ast.Assign(targets=targets, value=value):
            for target in targets:
                yield from _names(target, value, Form.SAME)
        case ast.AnnAssign(target=target, value=ast.expr() as value):
            yield from _names(target, value, Form.SAME)
        case ast.NamedExpr(target=target, value=value) | ast.AugAssign(target=target, value=value):
            yield from _names(target, value, Form.SAME)
        case ast.For(target=target, iter=value) | ast.comprehension(target=target, iter=value):
            yield from _names(target, value, Form.ITEM)
        case ast.withitem(context_expr=value, optional_vars=ast.expr() as target):
            yield from _names(target, value, Form.SAME)
        case ast.Call(func=ast.Attribute(value=ast.Name(name), attr="append" | "extend" | "update"), args=[value]):
            yield name, Given(value, Form.HOLDS)


def _names(target: ast.expr, value: ast.expr, form: Form) -> Iterator[tuple[str, Given]]:
    for each, given in pairs(target, value, form):
        match each:
            case ast.Name(name):
                yield name, given
            case ast.Attribute(value=ast.Name(name)) | ast.Subscript(value=ast.Name(name)):
                yield name, Given(given.node, Form.HOLDS, given.part)
