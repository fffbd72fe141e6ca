"""Follow what modules hold through the functions that load weights, and note every place that writes one of them.

One function is followed at a time, statement by statement, with a `Value` for each variable: both sides of a
condition, a loop as if its first round had run already, a call by following the function it calls. Nothing runs.
"""

import ast
from dataclasses import replace

from fork.writes.attributes import Attributes
from fork.writes.expressions import attribute, evaluate, get
from fork.writes.frames import Frame, Write, either
from fork.writes.sources import Class, Function, Sources
from fork.writes.values import (
    STATE,
    Atom,
    Code,
    Kind,
    Made,
    Many,
    Owned,
    Sent,
    Table,
    Tuple,
    Type,
    Value,
    classed,
    items,
    join,
    known_as,
    part,
    reaches,
    texts,
)

#: What loads a model, and what reloads it: what it writes, and has written, is its business.
_MACHINERY = "vllm.model_executor.model_loader."


class Flow:
    """Follows functions; `writes` is what they were seen to write.

    `names` are those that any model declares as a parameter or a buffer.
    """

    def __init__(self, sources: Sources, names: dict[str, Kind]):
        self.sources = sources
        self.attributes = Attributes(sources, names)
        self.writes: list[Write] = []
        self.globals: dict[ast.expr, Value] = {}
        self._memory: dict[object, tuple[Value, list[Write]]] = {}
        self._active: set[object] = set()
        self._nested: dict[ast.AST, Function] = {}

    # Calls

    def root(self, function: Function, cls: Class | None) -> None:
        """Follow `function` as a model loader calls it: on a module of class `cls`, with the checkpoint's weights."""
        given = function.arguments
        values: list[Value] = [
            (Owned(each.arg),) if cls is None and "weight" not in each.arg else (Sent(),) for each in given
        ]
        if cls:
            values[:1] = [(Owned(given[0].arg, classes=(cls,)),)]
        self.invoke(Code(function), values, {})

    def invoke(self, code: Code, positional: list[Value], named: dict[str, Value]) -> Value:
        """What a call of `code` gives. A call that cannot reach a module is not followed, nor is a weight loader."""
        function = code.function
        values = [*code.bound, *positional]
        if function.is_loader or not (code.scope or reaches([*values, *named.values()])):
            return ()
        scope = code.scope if isinstance(code.scope, Frame) else None
        frame = Frame(function, scope)
        self._bind(frame, values, dict(code.named) | named)
        if function.owner and "staticmethod" not in function.decorators and frame.variables:
            first = next(iter(frame.variables.values()))
            frame.receiver = next((atom for atom in first if isinstance(atom, Owned)), None)
        key = (function, tuple(frame.variables.items()))
        if key not in self._memory or scope:
            active = (function, frame.receiver and frame.receiver.classes)
            if active in self._active:
                return ()
            self._active.add(active)
            self._memory[key] = self._follow(frame)
            self._active.remove(active)
        value, writes = self._memory[key]
        if not function.source.name.startswith(_MACHINERY):
            self.writes += writes
        return value

    def _follow(self, frame: Frame) -> tuple[Value, list[Write]]:
        before, self.writes = self.writes, []
        node = frame.function.node
        if isinstance(node, ast.Lambda):
            frame.returned = self.evaluate(frame, node.body)
        else:
            self.block(frame, node.body)
        writes, self.writes = list(dict.fromkeys(self.writes)), before
        value = join(frame.returned, (Many(join(*frame.yielded)),)) if frame.yielded else frame.returned
        return value, writes

    def _bind(self, frame: Frame, values: list[Value], named: dict[str, Value]) -> None:
        """Give each argument its value, else its default, and the class that its annotation names."""
        function, arguments = frame.function, frame.function.node.args
        given = len(arguments.posonlyargs) + len(arguments.args)
        method = function.owner is not None and "staticmethod" not in function.decorators
        for index, each in enumerate(function.arguments):
            if index < min(len(values), given):
                value = values[index]
            elif each.arg in named:
                value = named[each.arg]
            else:
                default = function.defaults.get(each.arg)
                value = self.evaluate(frame, default) if default else ()
            if each.annotation and (cls := self.sources.class_of(frame.source, each.annotation)):
                value = classed(value, (cls,))
            frame.set(each.arg, known_as(value, each.arg, receiver=not index and method))
        if arguments.vararg:
            frame.set(arguments.vararg.arg, (Many(join(*values[given:])),))
        if arguments.kwarg:
            known = {each.arg for each in function.arguments}
            rest = [value for name, value in named.items() if name not in known]
            frame.set(arguments.kwarg.arg, (Table(join(*rest)),))

    def nested(self, frame: Frame, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> Function:
        """The function that `node` defines inside the one that `frame` follows."""
        if node not in self._nested:
            name = "<lambda>" if isinstance(node, ast.Lambda) else node.name
            self._nested[node] = Function(frame.source, node, f"{frame.function.name}.{name}")
        return self._nested[node]

    def named_like(self, frame: Frame, atom: Owned, name: str) -> list[Code]:
        """Methods called `name` of the classes that the model defines or the file imports: `atom` may be of these."""
        source = frame.source
        nearby = [cls for each in self.sources.family(source) for cls in each.classes.values()]
        imported = (self.sources.meaning(source, each) for each in source.imported)
        nearby += [each for each in imported if isinstance(each, Class)]
        classes = dict.fromkeys(cls for cls in nearby if name in cls.methods)
        return [Code(cls.methods[name], ((replace(atom, classes=(cls,)),),)) for cls in classes]

    # Expressions

    def evaluate(self, frame: Frame, node: ast.expr) -> Value:
        return evaluate(self, frame, node)

    def attribute(self, atom: Owned, name: str) -> Value:
        return attribute(self, atom, name)

    def get(self, node: ast.Attribute, base: Value) -> Value:
        return get(self, node, base)

    def look_up(self, frame: Frame, value: Value, key: ast.expr, names: Value) -> Value:
        """`value` as it is found under `key`: what was any parameter is now the one of that name."""
        return tuple(
            frame.named(atom, key, texts(names)) if isinstance(atom, Owned) and atom.keys else atom for atom in value
        )

    # Statements

    def block(self, frame: Frame, body: list[ast.stmt]) -> bool:
        """Follow `body`; whether its end is reached."""
        tests = len(frame.tests)
        ends = all(self.statement(frame, node) for node in body)
        del frame.tests[tests:]
        return ends

    def statement(self, frame: Frame, node: ast.stmt) -> bool:
        """Follow one statement; whether the next one is reached."""
        match node:
            case ast.If():
                return self._if(frame, node)
            case ast.For() | ast.AsyncFor() | ast.While():
                self._loop(frame, node)
            case ast.Try():
                self._try(frame, node)
            case ast.With() | ast.AsyncWith():
                for item in node.items:
                    value = self.evaluate(frame, item.context_expr)
                    if item.optional_vars:
                        given = [atom.item for atom in value if isinstance(atom, Many)]
                        self.assign(frame, item.optional_vars, join(value, *given))
                return self.block(frame, node.body)
            case ast.Match():
                self._match(frame, node)
            case ast.Break() | ast.Continue():
                frame.jumps[-1].append((node, dict(frame.variables)))
                return False
            case ast.Return():
                if node.value:
                    frame.returned = join(frame.returned, self.evaluate(frame, node.value))
                return False
            case ast.Raise():
                return False
            case _:
                self._simple(frame, node)
        return True

    def _simple(self, frame: Frame, node: ast.stmt) -> None:
        match node:
            case ast.Assign(targets=targets, value=right):
                value = self.evaluate(frame, right)
                for target in targets:
                    self.assign(frame, target, value)
            case ast.AnnAssign(target=target, value=right) if right:
                self.assign(frame, target, self.evaluate(frame, right))
            case ast.AugAssign():
                self._augment(frame, node)
            case ast.Expr(value=inner):
                self.evaluate(frame, inner)
            case ast.Assert(test=test):
                self.evaluate(frame, test)
                self.narrow(frame, test, True)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                frame.set(node.name, (Code(self.nested(frame, node), scope=frame),))
            case ast.ClassDef() if node.name in frame.source.classes:
                frame.set(node.name, (Type(frame.source.classes[node.name]),))

    def _if(self, frame: Frame, node: ast.If) -> bool:
        self.evaluate(frame, node.test)
        before = dict(frame.variables)
        ends, after = [], []
        for body, truth in ((node.body, True), (node.orelse, False)):
            frame.variables = dict(before)
            self.narrow(frame, node.test, truth)
            frame.tests.append((node.test, truth))
            ends.append(self.block(frame, body))
            frame.tests.pop()
            after.append(frame.variables)
        frame.variables = either(*[variables for variables, end in zip(after, ends, strict=True) if end] or [before])
        if ends == [False, True] or ends == [True, False]:
            frame.tests.append((node.test, ends[0]))
        return any(ends)

    def _loop(self, frame: Frame, node: ast.For | ast.AsyncFor | ast.While) -> None:
        """Follow the body twice, so that what one round leaves meets the next; only the second time counts."""
        each = self.evaluate(frame, node.test if isinstance(node, ast.While) else node.iter)
        before, writes, self.writes = dict(frame.variables), self.writes, []
        jumps: list[tuple[ast.stmt, dict[str, Value]]] = []
        for last in (False, True):
            frame.jumps.append([])
            if not isinstance(node, ast.While):
                self.assign(frame, node.target, items(each))
            end = [frame.variables] if self.block(frame, node.body) else []
            jumps = frame.jumps.pop()
            rounds = [variables for jump, variables in jumps if isinstance(jump, ast.Continue)]
            frame.variables = either(before, *end, *rounds)
            if not last:
                self.writes = []
        self.block(frame, node.orelse)
        frame.variables = either(frame.variables, *(held for jump, held in jumps if isinstance(jump, ast.Break)))
        self.writes = writes + self.writes

    def _try(self, frame: Frame, node: ast.Try) -> None:
        self.block(frame, node.body)
        for handler in node.handlers:
            before = frame.variables
            frame.variables = dict(before)
            self.block(frame, handler.body)
            frame.variables = either(before, frame.variables)
        self.block(frame, node.orelse)
        self.block(frame, node.finalbody)

    def _match(self, frame: Frame, node: ast.Match) -> None:
        self.evaluate(frame, node.subject)
        before = frame.variables
        after = [before]
        for case in node.cases:
            frame.variables = dict(before)
            self.block(frame, case.body)
            after.append(frame.variables)
        frame.variables = either(*after)

    def narrow(self, frame: Frame, test: ast.expr, truth: bool) -> None:
        """Give a variable the class that `isinstance` in `test` has shown it to be of."""
        match test:
            case ast.UnaryOp(op=ast.Not(), operand=inner):
                self.narrow(frame, inner, not truth)
            case ast.BoolOp(op=op, values=inner) if truth == isinstance(op, ast.And):
                for each in inner:
                    self.narrow(frame, each, truth)
            case ast.Call(func=ast.Name("isinstance"), args=[ast.Name(name), named]) if truth:
                options = named.elts if isinstance(named, ast.Tuple) else [named]
                classes = tuple(cls for each in options if (cls := self.sources.class_of(frame.source, each)))
                value = frame.find(name)
                if classes and value:
                    frame.set(name, classed(value, classes))

    # Writes and assignments

    def assign(self, frame: Frame, target: ast.expr, value: Value) -> None:
        match target:
            case ast.Name(name):
                frame.set(name, value)
            case ast.Starred(inner):
                self.assign(frame, inner, (Many(items(value)),))
            case ast.Tuple(targets) | ast.List(targets):
                starred = any(isinstance(each, ast.Starred) for each in targets)
                for index, each in enumerate(targets):
                    self.assign(frame, each, items(value) if starred else part(value, index, len(targets)))
            case ast.Attribute(inner, name):
                self.rebind(frame, target, self.evaluate(frame, inner), name, value)
            case ast.Subscript():
                self._put(frame, target, value)

    def _put(self, frame: Frame, target: ast.Subscript, value: Value) -> None:
        """`target[...] = value`: a write where it is a tensor, which a slice shows of what is not known."""
        base = self.evaluate(frame, target.value)
        self.evaluate(frame, target.slice)
        if isinstance(target.value, ast.Attribute) and target.value.attr in ("_parameters", "_buffers"):
            self.note(frame, target, "rebind", base, sure=False)
        else:
            sliced = any(isinstance(inner, ast.Slice) for inner in ast.walk(target.slice))
            self.note(frame, target, "subscript", base, sure=not sliced)
            self.fill(frame, target.value, value)

    def fill(self, frame: Frame, node: ast.expr, value: Value) -> None:
        """Note that the list or dictionary `node` now holds `value` too."""
        if isinstance(node, ast.Subscript):
            self.fill(frame, node.value, (Many(value),))
        elif isinstance(node, ast.Name) and (held := frame.find(node.id)) is not None:
            frame.set(node.id, tuple(_with(atom, value) for atom in held))

    def _augment(self, frame: Frame, node: ast.AugAssign) -> None:
        value = self.evaluate(frame, node.value)
        match node.target:
            case ast.Subscript():
                self._put(frame, node.target, value)
            case ast.Name(name):
                old = self.evaluate(frame, node.target)
                self.note(frame, node, "augmented", old)
                frame.set(name, join(old, value))
            case _:
                self.note(frame, node, "augmented", self.evaluate(frame, node.target))

    def rebind(self, frame: Frame, node: ast.expr | ast.stmt, base: Value, name: str, value: Value) -> None:
        """`base.name = value`: a write where `name` is `data`, or holds or gets a parameter."""
        for atom in base:
            if not isinstance(atom, Owned):
                continue
            if name == "data":
                self.note(frame, node, "data", (atom,), sure=False)
            elif atom.kind is Kind.UNKNOWN:
                held = self.attributes.of(atom, name)
                new = any(isinstance(each, Made) and each.parameter for each in value)
                tensor = any(isinstance(each, Made | Sent | Owned) for each in value)
                known = held.kind is Kind.PARAMETER and (tensor or self.attributes.declares(atom, name))
                if new or known:
                    self.note(frame, node, "rebind", (replace(held, kind=Kind.PARAMETER),))

    def note(self, frame: Frame, node: ast.expr | ast.stmt, how: str, value: Value, sure: bool = True) -> None:
        """Note a write to what `value` is or holds; `sure` asks for what is known to be a parameter."""
        wanted = STATE if sure else (*STATE, Kind.UNKNOWN)
        for atom in value:
            match atom:
                case Owned(kind=kind) if kind in wanted:
                    self._add(frame, node, how, frame.label(atom))
                case Sent() if how in ("in-place", "out"):
                    self._add(frame, node, "sender", ast.unparse(node))
                case Many(item) | Table(item) if not sure:
                    self.note(frame, node, how, item, sure)
                case Tuple(parts) if not sure:
                    for each in parts:
                        self.note(frame, node, how, each, sure)

    def _add(self, frame: Frame, node: ast.expr | ast.stmt, how: str, parameter: str) -> None:
        self.writes.append(Write(frame.source.path, node.lineno, frame.function.name, parameter, how))


def _with(atom: Atom, value: Value) -> Atom:
    return replace(atom, item=join(atom.item, value)) if isinstance(atom, Many | Table) else atom
