"""Where the body of a function binds an attribute of an object that outlives it."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from fork.rebinds.bodies import Form, Given, pairs
from fork.rebinds.evaluate import Evaluator, Scope
from fork.rebinds.values import NEW, TENSORS, Kind, Value
from fork.writes.frames import shown
from fork.writes.sources import Class, Sources

#: What stays a plain attribute where it is bound.
_PLAIN_NEW = NEW - {Kind.PARAMETER}

_FILLS = ("append", "extend", "insert", "add", "update", "setdefault")


@dataclass(frozen=True)
class Place:
    """One binding: `target` is the object, `attribute` what of it is bound to `value`.

    `own` where the object is the one that the method is called on, or something that it holds; `registered` where what
    is bound becomes a parameter or a buffer of it.
    """

    node: ast.expr | ast.stmt
    target: ast.expr
    attribute: str
    source: ast.expr
    value: Value
    own: bool
    registered: bool = False


def places(evaluator: Evaluator, scope: Scope) -> Iterator[Place]:
    """Every binding of an attribute in the body that `scope` looks into, but those of objects that it makes itself."""
    for node in evaluator.body(scope.function).bindings:
        for target, name, given, registered in _bound(evaluator, scope, node):
            own = _root(target) == scope.me
            if own or _outlives(evaluator, scope, target):
                value, last = evaluator.given(given, scope), latest(evaluator, scope, given)
                made = value if evaluator.given(last, scope) != {Kind.PARAMETER} else {Kind.PARAMETER}
                parameter = Kind.PARAMETER in made and not _PLAIN_NEW & made
                yield Place(node, target, name, last.node, value, own, registered or parameter)


def latest(evaluator: Evaluator, scope: Scope, given: Given) -> Given:
    """What a name that is bound got last above the place where it is bound."""
    if not isinstance(given.node, ast.Name):
        return given
    above = (
        each
        for each in evaluator.body(scope.function).names.get(given.node.id, ())
        if each.form is Form.SAME and each.node.lineno < given.node.lineno and not isinstance(each.node, ast.Constant)
    )
    return max(above, key=lambda each: each.node.lineno, default=given)


#: The object, the name of the attribute, what it gets, and whether that is registered.
_Bound = tuple[ast.expr, str, Given, bool]


def _bound(evaluator: Evaluator, scope: Scope, node: ast.expr | ast.stmt) -> Iterator[_Bound]:
    match node:
        case ast.Assign(targets=targets, value=value):
            for target in targets:
                for each, given in pairs(target, value):
                    yield from _target(evaluator, scope, each, given)
        case ast.AnnAssign(target=target, value=ast.expr() as value):
            yield from _target(evaluator, scope, target, Given(value))
        case ast.AugAssign(target=target, value=value) if evaluator.of(value, scope) == {Kind.HOST}:
            yield from _target(evaluator, scope, target, Given(value))  # a tensor is changed in place
        case ast.Call(func=ast.Name("setattr"), args=[target, name, value]):
            yield target, _literal(name), Given(value), False
        case ast.Call(func=ast.Name("replace_parameter"), args=[target, name, value, *_]):
            if not _copies(evaluator.sources, node):
                yield target, _literal(name), Given(value), True
        case ast.Call(func=ast.Attribute(target, "register_buffer" | "register_parameter"), args=[name, value, *_]):
            yield target, _literal(name), Given(value), True
        case ast.Call(func=ast.Attribute(ast.Attribute(target, name) as inner, method), args=[*_, value]):
            if method in _FILLS and not evaluator.of(inner, scope) & TENSORS:
                yield target, name, Given(value, Form.HOLDS), False


def _target(evaluator: Evaluator, scope: Scope, target: ast.expr, given: Given) -> Iterator[_Bound]:
    match target:
        case ast.Attribute(ast.Attribute(inner, name), "data"):
            yield inner, name, given, True
        case ast.Attribute(inner, name) if name != "data":
            yield inner, name, given, False
        case ast.Subscript(ast.Attribute(inner, name) as whole, key) if not isinstance(key, ast.Slice | ast.Tuple):
            if not evaluator.of(whole, scope) & TENSORS:
                yield inner, name, Given(given.node, Form.HOLDS, given.part), False


def _copies(sources: Sources, node: ast.Call) -> bool:
    """Whether this `replace_parameter` copies into the old one: where asked to, or always as later bases do."""
    utils = sources.get("vllm.model_executor.utils")
    function = utils.functions.get("replace_parameter") if utils else None
    if function and "prefer_copy" not in {each.arg for each in function.arguments}:
        return True
    asked = {each.arg: each.value for each in node.keywords}.get("prefer_copy")
    return isinstance(asked, ast.Constant) and asked.value is True


def _literal(node: ast.expr) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else f"<{shown(node)}>"


def _root(node: ast.expr) -> str | None:
    """The name that a chain of attributes starts with."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def _outlives(evaluator: Evaluator, scope: Scope, target: ast.expr) -> bool:
    """Whether the object is handed in, or reached from one that is; attributes of tensors do not count."""
    root = _root(target)
    if root is None or evaluator.of(target, scope) & TENSORS:
        return False
    if any(each.arg == root for each in scope.function.arguments):
        return True
    given = [each for each in evaluator.body(scope.function).names.get(root, ()) if each.form is not Form.HOLDS]
    there = (each.form is Form.ITEM or isinstance(each.node, ast.Attribute | ast.Name) for each in given)
    return bool(given) and all(there)


def is_module(sources: Sources, cls: Class) -> bool:
    """Whether `cls` is a torch module: attributes that hold parameters and buffers are then registered."""
    bases = (ast.unparse(base) for each in sources.order(cls) for base in each.node.bases)
    return any(base.rsplit(".", 1)[-1] in ("Module", "ModuleList", "Linear", "Embedding") for base in bases)


def refreshed(evaluator: Evaluator, scope: Scope, place: Place) -> bool:
    """Whether the body writes into what `place` binds in place, and takes only one of the two ways at a time."""
    body = evaluator.body(scope.function)
    branches = [branch for node in body.nodes if isinstance(node, ast.If) for branch in (node.body, node.orelse)]
    for call in body.calls:
        match call.func:
            case ast.Attribute(ast.Attribute(target, place.attribute), "copy_" | "fill_"):
                one = any(_holds(branch, call) != _holds(branch, place.node) for branch in branches)
                if one and ast.unparse(target) == ast.unparse(place.target):
                    return True
    return False


def _holds(branch: list[ast.stmt], node: ast.AST) -> bool:
    return any(each is node for statement in branch for each in ast.walk(statement))
