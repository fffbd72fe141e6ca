"""What an expression can stand for, operator by operator; calls are in `fork.writes.calls`."""

import ast
import builtins
from typing import TYPE_CHECKING

from fork.writes.calls import evaluate_call
from fork.writes.frames import Frame
from fork.writes.sources import Class, Function, Meaning, Source
from fork.writes.values import (
    Code,
    Kind,
    Made,
    Many,
    Module,
    Outside,
    Owned,
    Sent,
    Table,
    Text,
    Tuple,
    Type,
    Value,
    items,
    join,
)

if TYPE_CHECKING:
    from fork.writes.dataflow import Flow

_Comprehension = ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp


def evaluate(flow: "Flow", frame: Frame, node: ast.expr) -> Value:
    """What `node` can stand for in `frame`."""
    match node:
        case ast.Name(name):
            value = frame.find(name)
            return value if value is not None else _global(flow, frame.source, name)
        case ast.Attribute(inner):
            return get(flow, node, evaluate(flow, frame, inner))
        case ast.Call():
            return evaluate_call(flow, frame, node)
        case ast.Subscript():
            return _subscript(flow, frame, node)
        case ast.Constant(text):
            return (Text(text),) if isinstance(text, str) else ()
        case ast.Tuple(parts) if not any(isinstance(each, ast.Starred) for each in parts):
            return (Tuple(tuple(evaluate(flow, frame, each) for each in parts)),)
        case ast.Tuple(parts) | ast.List(parts) | ast.Set(parts):
            return (Many(join(*(_spread(flow, frame, each) for each in parts))),)
        case ast.Dict(keys, values):
            held = [evaluate(flow, frame, each) for each in values]
            return (Table(join(*(each if key else items(each) for key, each in zip(keys, held, strict=True)))),)
        case ast.Lambda():
            return (Code(flow.nested(frame, node), scope=frame),)
        case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
            return _comprehension(flow, frame, node)
        case _:
            return _combined(flow, frame, node)


def _combined(flow: "Flow", frame: Frame, node: ast.expr) -> Value:
    match node:
        case ast.IfExp(test, body, orelse):
            evaluate(flow, frame, test)
            return join(evaluate(flow, frame, body), evaluate(flow, frame, orelse))
        case ast.BoolOp(values=values):
            return join(*(evaluate(flow, frame, each) for each in values))
        case ast.NamedExpr(target, inner):
            value = evaluate(flow, frame, inner)
            flow.assign(frame, target, value)
            return value
        case ast.Await(inner) | ast.Starred(inner):
            return evaluate(flow, frame, inner)
        case ast.Yield(inner):
            frame.yielded.append(evaluate(flow, frame, inner) if inner else ())
        case ast.YieldFrom(inner):
            frame.yielded.append(items(evaluate(flow, frame, inner)))
        case ast.BinOp(left, _, right):
            both = join(evaluate(flow, frame, left), evaluate(flow, frame, right))
            held = tuple(atom for atom in both if isinstance(atom, Many | Table | Tuple))
            tensor = any(isinstance(atom, Owned | Made | Sent) for atom in both)
            return held or ((Made(),) if tensor else ())
        case _:
            for child in ast.iter_child_nodes(node):
                if isinstance(child, ast.expr):
                    evaluate(flow, frame, child)
    return ()


def _spread(flow: "Flow", frame: Frame, node: ast.expr) -> Value:
    value = evaluate(flow, frame, node)
    return items(value) if isinstance(node, ast.Starred) else value


def _comprehension(flow: "Flow", frame: Frame, node: _Comprehension) -> Value:
    before, tests = dict(frame.variables), len(frame.tests)
    for loop in node.generators:
        flow.assign(frame, loop.target, items(evaluate(flow, frame, loop.iter)))
        for test in loop.ifs:
            evaluate(flow, frame, test)
            flow.narrow(frame, test, True)
            frame.tests.append((test, True))
    if isinstance(node, ast.DictComp):
        evaluate(flow, frame, node.key)
        value: Value = (Table(evaluate(flow, frame, node.value)),)
    else:
        value = (Many(evaluate(flow, frame, node.elt)),)
    frame.variables = before
    del frame.tests[tests:]
    return value


def _global(flow: "Flow", source: Source, name: str) -> Value:
    return meant(flow, flow.sources.meaning(source, name) or (name if name in dir(builtins) else None))


def meant(flow: "Flow", meaning: Meaning | None) -> Value:
    """What a name of a module stands for. The value of a global is found once, with no variables around it."""
    match meaning:
        case Function():
            return (Code(meaning),)
        case Class():
            return (Type(meaning),)
        case Source():
            return (Module(meaning),)
        case str():
            return (Outside(meaning),)
        case (source, node):
            if node not in flow.globals:
                flow.globals[node] = ()
                flow.globals[node] = evaluate(flow, Frame(Function(source, _EMPTY, source.name)), node)
            return flow.globals[node]
    return ()


#: The body of a module has no arguments.
_EMPTY = ast.Lambda(args=ast.arguments([], [], None, [], [], None, []), body=ast.Constant(None))


def get(flow: "Flow", node: ast.Attribute, base: Value) -> Value:
    """Attribute `node` of `base`. What is read as `.data` of something unknown is taken for a parameter."""
    name = node.attr
    if not base and name == "data":
        return (Owned(ast.unparse(node.value), Kind.PARAMETER),)
    found: list[Value] = []
    for atom in base:
        match atom:
            case Owned():
                found.append(attribute(flow, atom, name))
            case Sent() | Made():
                found.append((atom,))
            case Module(source):
                found.append(meant(flow, flow.sources.meaning(source, name)))
            case Type(cls) if method := flow.sources.method(cls, name):
                found.append((Code(method, ((atom,),) if "classmethod" in method.decorators else ()),))
            case Outside(outside):
                found.append((Outside(f"{outside}.{name}"),))
    return join(*found)


def attribute(flow: "Flow", atom: Owned, name: str) -> Value:
    """What attribute `name` of `atom` stands for: a method, the value of a property, or what it holds."""
    found: list[Value] = []
    for cls in atom.classes:
        if method := flow.sources.method(cls, name):
            receiver = Owned(atom.path, atom.kind, (cls,), atom.keys)
            if method.decorators & {"property", "cached_property"}:
                found.append(flow.invoke(Code(method, ((receiver,),)), [], {}))
            else:
                found.append((Code(method, () if "staticmethod" in method.decorators else ((receiver,),)),))
    if found:
        return join(*found)
    held = flow.attributes.of(atom, name)
    return () if held.kind is Kind.PLAIN and atom.kind is not Kind.UNKNOWN else (held,)


def _subscript(flow: "Flow", frame: Frame, node: ast.Subscript) -> Value:
    base = evaluate(flow, frame, node.value)
    key = evaluate(flow, frame, node.slice)
    found: list[Value] = []
    for atom in base:
        match atom, node.slice:
            case Tuple(parts), ast.Constant(int(index)) if -len(parts) <= index < len(parts):
                found.append(parts[index])
            case ((Many() | Owned()), ast.Slice()):
                found.append((atom,))
            case Table(item), _:
                found.append(flow.look_up(frame, item, node.slice, key))
            case _:
                found.append(items((atom,)))
    return join(*found)
