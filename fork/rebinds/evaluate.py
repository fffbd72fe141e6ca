"""Evaluate expressions of a tree to the kinds of tensor they give, through the functions that they call."""

import ast
import builtins
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from fork.rebinds.bodies import Body, Form, Given, read_body
from fork.rebinds.memory import Memory
from fork.rebinds.values import (
    BLANK,
    GENERAL,
    HOSTS,
    NOTHING,
    PLAIN,
    TENSOR_ONLY,
    TENSORS,
    VIEWS,
    Kind,
    Value,
    collected,
    computed,
    element,
    gives_tensor,
    held,
    join,
    returns,
    words,
)
from fork.writes.attributes import Attributes
from fork.writes.sources import Class, Function, Source, Sources
from fork.writes.values import Kind as Declared
from fork.writes.values import Owned

_MACHINERY = "vllm.model_executor.model_loader."

_NUMBERS = words("float int bool complex")
_COLLECT = words("list tuple set frozenset dict sorted deque OrderedDict defaultdict")
_EACH = words("zip enumerate map filter reversed iter next max min sum abs chain islice")


@dataclass(frozen=True)
class Scope:
    """One call that is looked into: `owner` is the class of the object that a method is called on."""

    function: Function
    owner: Class | None = None
    given: tuple[tuple[str, Value], ...] = ()
    outer: "Scope | None" = None

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.function, self.owner, self.given, self.outer))

    @property
    def source(self) -> Source:
        return self.function.source

    @cached_property
    def me(self) -> str:
        """The name of the object that a method is called on; empty in a plain function."""
        if self.outer:
            return self.outer.me
        static = "staticmethod" in self.function.decorators
        arguments = self.function.arguments
        return arguments[0].arg if self.owner and not static and arguments else ""


class Evaluator:
    """Evaluates expressions.

    `weights` are the names that models declare as parameters and buffers, `hosts` those of numbers read from tensors. A
    method called on a base of one of `classes` may be the one of that class.
    """

    def __init__(
        self,
        sources: Sources,
        weights: dict[str, Declared],
        classes: Iterable[Class],
        hosts: frozenset[str] = frozenset(),
    ):
        self.sources = sources
        self.attributes = Attributes(sources, weights)
        self._subclasses: dict[Class, list[Class]] = {}
        for cls in classes:
            for base in sources.order(cls)[1:]:
                self._subclasses.setdefault(base, []).append(cls)
        self._weights, self._hosts = weights, hosts
        self._bodies: dict[Function, Body] = {}
        self._inner: dict[ast.AST, Function] = {}
        self._memory = Memory()
        self._called: dict[tuple[ast.Call, Function, Class | None], list[tuple[Function, Class | None]]] = {}
        self._classes: dict[tuple[ast.expr, Function, Class | None], tuple[Class, ...]] = {}

    def body(self, function: Function) -> Body:
        if function not in self._bodies:
            self._bodies[function] = read_body(function)
        return self._bodies[function]

    def of(self, node: ast.expr, scope: Scope) -> Value:
        """What `node` can give in `scope`."""
        match node:
            case ast.Name(name):
                return self._name(name, scope)
            case ast.Attribute(inner, name):
                return self._attribute(inner, name, scope)
            case ast.Call():
                return self._call(node, scope)
            case ast.Subscript(value=inner):
                return element(self.of(inner, scope))
            case ast.IfExp(body=body, orelse=orelse):
                return self.of(body, scope) | self.of(orelse, scope)
            case ast.BoolOp(values=values) | ast.Tuple(elts=values):
                return join(self.of(each, scope) for each in values)
            case ast.List(elts=values) | ast.Set(elts=values) | ast.Dict(values=values):
                return collected(join(self.of(each, scope) for each in values))
            case ast.ListComp(elt=item) | ast.SetComp(elt=item) | ast.GeneratorExp(elt=item) | ast.DictComp(value=item):
                return collected(self.of(item, scope))
            case ast.UnaryOp(op=ast.Not()):
                return NOTHING
            case ast.BinOp() | ast.UnaryOp():
                parts = [each for each in ast.iter_child_nodes(node) if isinstance(each, ast.expr)]
                value = join(self.of(each, scope) for each in parts)
                return computed(value) if value & TENSORS else value & {Kind.HOST}
            case ast.NamedExpr(value=inner) | ast.Starred(value=inner) | ast.Await(value=inner):
                return self.of(inner, scope)
            case ast.Lambda():
                return self._captured(self.inner(node, scope), scope)
        return NOTHING

    # Names

    def inner(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda, scope: Scope) -> Function:
        """The function that `node` defines in `scope`."""
        if node not in self._inner:
            name = "<lambda>" if isinstance(node, ast.Lambda) else node.name
            self._inner[node] = Function(scope.source, node, f"{scope.function.name}.{name}")
        return self._inner[node]

    def _name(self, name: str, scope: Scope) -> Value:
        return self._memory.find((name, scope), lambda: self._name_of(name, scope))

    def _name_of(self, name: str, scope: Scope) -> Value:
        argument = name in {each.arg for each in scope.function.arguments}
        names = self.body(scope.function).names.get(name, ())
        # What an argument is given to hold says nothing of what it is.
        found = [self.given(each, scope) for each in names if not (argument and each.form is Form.HOLDS)]
        given = dict(scope.given)
        if name in given:
            found.append(given[name])
        elif any(each.arg == name and _is_tensor(each.annotation) for each in scope.function.arguments):
            found.append(frozenset({Kind.OTHER}))
        if defined := self.defined(name, scope):
            found.append(self._captured(defined, scope))
        if not found and scope.outer and not argument:
            return self._name(name, scope.outer)
        return join(found)

    def given(self, given: Given, scope: Scope) -> Value:
        """What a name or an attribute gets."""
        value = self.of(given.node, scope) if given.part is None else self._part(given.node, given.part, scope)
        return {Form.SAME: value, Form.ITEM: element(value), Form.HOLDS: held(value)}[given.form]

    def _part(self, node: ast.expr, part: tuple[int, int], scope: Scope) -> Value:
        """One of the values that `node` gives as a tuple, where the functions that it calls return one."""
        index, count = part
        found: list[Value] = []
        for called in self.called(node, scope) if isinstance(node, ast.Call) else ():
            for each in self.body(called.function).returned:
                if not isinstance(each, ast.Tuple) or len(each.elts) != count:
                    return self.of(node, scope)
                found.append(self.of(each.elts[index], called))
        return join(found) if found else self.of(node, scope)

    def defined(self, name: str, scope: Scope) -> Function | None:
        """The function called `name` that is defined in `scope`."""
        node = self.body(scope.function).inner.get(name)
        return self.inner(node, scope) if node else None

    def _captured(self, function: Function, scope: Scope) -> Value:
        """What a function that is defined in `scope` keeps of it."""
        body = self.body(function)
        own = {each.arg for each in function.arguments} | set(body.names)
        free = {node.id for node in body.nodes if isinstance(node, ast.Name) and node.id not in own}
        free -= {scope.me}
        return held(join([*(self._name(name, scope) for name in sorted(free)), *self._defaults(function, scope)]))

    def _defaults(self, function: Function, scope: Scope) -> Iterator[Value]:
        for default in function.defaults.values():
            yield self.of(default, scope)

    def _attribute(self, inner: ast.expr, name: str, scope: Scope) -> Value:
        if name in PLAIN:
            return NOTHING
        if name in self._hosts:
            return frozenset({Kind.HOST})
        base = self.of(inner, scope)
        if name in VIEWS:
            return base or frozenset({Kind.WEIGHT} if name == "data" else ())
        if base or self.outside(inner, scope):
            return NOTHING
        classes = self.classes(inner, scope)
        for cls in classes:
            method = self.sources.method(cls, name)
            if method and method.decorators & {"property", "cached_property"}:
                return self.result(Scope(method, cls))
        kind = self.attributes.of(Owned("", classes=classes), name).kind
        if kind is Declared.UNKNOWN and name in self._weights:
            kind = self._weights[name]
        known = {Declared.PARAMETER: Kind.WEIGHT, Declared.BUFFER: Kind.OTHER, Declared.TENSOR: Kind.OTHER}
        return frozenset({known[kind]} if kind in known else ())

    def classes(self, node: ast.expr, scope: Scope) -> tuple[Class, ...]:
        """The classes that the object `node` may be of."""
        key = (node, scope.function, scope.owner)
        if key not in self._classes:
            self._classes[key] = ()
            self._classes[key] = self._classes_of(node, scope)
        return self._classes[key]

    def _classes_of(self, node: ast.expr, scope: Scope) -> tuple[Class, ...]:
        match node:
            case ast.Name(name) if name == scope.me and scope.owner:
                return (scope.owner,)
            case ast.Attribute(inner, name) if classes := self.classes(inner, scope):
                return self.attributes.of(Owned("", classes=classes), name).classes
            case ast.Call(func=func) if cls := self.sources.class_of(scope.source, func):
                return (cls,)
            case ast.Name(name):
                names = self.body(scope.function).names.get(name, ())
                given = [each.node for each in names if each.form is Form.SAME and not each.part]
                for each in scope.function.arguments:
                    if each.arg == name and each.annotation:
                        cls = self.sources.class_of(scope.source, each.annotation)
                        return (cls,) if cls else ()
                simple = [each for each in given if isinstance(each, ast.Attribute | ast.Call)]
                return tuple(cls for each in simple[:4] for cls in self.classes(each, scope))
        return ()

    def outside(self, node: ast.expr, scope: Scope) -> str:
        """The dotted name of `node` where that is nothing of the tree: `torch.nn`; empty where it is anything else."""
        match node:
            case ast.Attribute(inner, name) if base := self.outside(inner, scope):
                return f"{base}.{name}"
            case ast.Name(name) if name not in self.body(scope.function).names:
                meaning = self.sources.meaning(scope.source, name)
                return meaning if isinstance(meaning, str) else ""
        return ""

    # Calls

    def _call(self, node: ast.Call, scope: Scope) -> Value:
        arguments = [*node.args, *(each.value for each in node.keywords)]
        everything = join(self.of(each, scope) for each in arguments)
        if name := self.outside(node.func, scope):
            return _outside(name, everything)
        called = self.called(node, scope)
        if called:
            return join(self.result(each) for each in called)
        if cls := self.sources.class_of(scope.source, node.func):
            return self._made(cls, node, scope, everything)
        match node.func:
            case ast.Name("getattr") if len(node.args) >= 2 and isinstance(node.args[1], ast.Constant):
                held_there = self._attribute(node.args[0], str(node.args[1].value), scope)
                return join([held_there, *(self.of(each, scope) for each in node.args[2:])])
            case ast.Name(name) if name in dir(builtins):
                return _builtin(name, everything)
            case ast.Attribute(inner, name):
                return _method(name, self.of(inner, scope), everything)
        return computed(everything) if everything & TENSORS else held(everything)

    def called(self, node: ast.Call, scope: Scope) -> list[Scope]:
        """The functions of the tree that `node` may call, with the arguments that it gives them."""
        key = (node, scope.function, scope.owner)
        if key not in self._called:
            self._called[key] = list(self._functions(node.func, scope))
        return [self._bind(function, owner, node, scope) for function, owner in self._called[key]]

    def _functions(self, func: ast.expr, scope: Scope) -> Iterator[tuple[Function, Class | None]]:
        match func:
            case ast.Name(name):
                meaning = self.defined(name, scope) or self.sources.meaning(scope.source, name)
                if isinstance(meaning, Function):
                    yield meaning, None
            case ast.Attribute(ast.Call(func=ast.Name("super")), name) if scope.owner:
                after = scope.function.owner
                if method := self.sources.method(scope.owner, name, after=after):
                    yield method, scope.owner
            case ast.Attribute(inner, name):
                module = self.sources.meaning(scope.source, inner.id) if isinstance(inner, ast.Name) else None
                if isinstance(module, Source) and (function := module.functions.get(name)):
                    yield function, None
                classes = self.classes(inner, scope)
                if not classes and (cls := self.sources.class_of(scope.source, inner)):
                    classes = (cls,)
                if not classes and not module and not self.outside(inner, scope) and name not in GENERAL:
                    classes = tuple(cls for cls in scope.source.every_class if name in cls.methods)
                below = (each for base in classes for each in (base, *self._subclasses.get(base, ())))
                for cls in dict.fromkeys(below):
                    method = self.sources.method(cls, name)
                    if method and (cls in classes or method.owner is cls):
                        yield method, cls

    def _bind(self, function: Function, owner: Class | None, node: ast.Call, scope: Scope) -> Scope:
        if "load_weights" in scope.function.name:
            return Scope(function, owner)  # what it passes on is the checkpoint's
        names = [each.arg for each in function.arguments]
        if owner and "staticmethod" not in function.decorators:
            names = names[1:]
        values = {name: self.of(each, scope) for name, each in zip(names, node.args, strict=False)}
        values |= {each.arg: self.of(each.value, scope) for each in node.keywords if each.arg in names}
        outer = scope if self._inner.get(function.node) is function else None
        return Scope(function, owner, tuple((name, values[name]) for name in names if values.get(name)), outer)

    def result(self, scope: Scope) -> Value:
        """What a call gives."""
        said = returns(scope.function)
        if said == "plain" or scope.source.name.startswith(_MACHINERY):
            return NOTHING
        return self._memory.find(scope, lambda: self._result(scope, said))

    def _result(self, scope: Scope, said: str) -> Value:
        value = join(self.of(each, scope) for each in self.body(scope.function).returned)
        if not value and said == "tensor":
            return computed(join(each for _, each in scope.given))
        return value

    def _made(self, cls: Class, node: ast.Call, scope: Scope, everything: Value) -> Value:
        """A new object: it holds what it is given, and what it makes of that at once."""
        if cls.name.endswith("Parameter"):
            return frozenset({Kind.PARAMETER})
        value = held(everything)
        if made := self.sources.method(cls, "__init__"):
            inside = self._bind(made, cls, node, scope)
            value |= join(held(self.of(each, inside)) for _, each in made.declares)
        return value


def _is_tensor(annotation: ast.expr | None) -> bool:
    return annotation is not None and "Tensor" in ast.unparse(annotation)


def _outside(name: str, everything: Value) -> Value:
    last = name.rsplit(".", 1)[-1]
    if last.endswith("Parameter"):
        return frozenset({Kind.PARAMETER})
    if last in VIEWS and everything:
        return everything
    if name.startswith("torch.") and gives_tensor(name):
        return frozenset({Kind.MADE}) if last in BLANK else computed(everything)
    if last in ("partial", "replace"):
        return held(everything)
    if name.startswith(("logging", "typing", "os", "math", "torch")):
        return everything if last == "cast" else NOTHING
    return computed(everything) if everything & TENSORS else held(everything)


def _builtin(name: str, everything: Value) -> Value:
    if name in _NUMBERS:
        return frozenset({Kind.HOST}) if everything & (TENSORS | {Kind.HOST}) else NOTHING
    if name in _COLLECT:
        return collected(everything)
    return element(everything) if name in _EACH else NOTHING


def _method(name: str, base: Value, everything: Value) -> Value:
    """A method that is known by its name alone."""
    if name in PLAIN:
        return NOTHING
    if name in HOSTS:
        return frozenset({Kind.HOST})
    if name in VIEWS or (name.endswith("_") and not name.endswith("__")):
        return base
    if name in BLANK:
        return frozenset({Kind.MADE})
    if name in TENSOR_ONLY or base & TENSORS:
        return computed(base, everything)
    if base:
        return element(base)
    return computed(everything) if everything & TENSORS else NOTHING
