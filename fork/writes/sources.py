"""The Python files of a tree, parsed when first asked for: what a name stands for, and which classes have a method."""

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from fork.errors import ForkError
from fork.evaluate import Reader

_FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef

#: Where each model is one file; elsewhere it is a folder below `vllm.models`.
_FLAT = "vllm.model_executor."

#: What follows where a weight loader is attached: as an attribute, in a dictionary, by keyword or with `setattr`.
_ATTACHED = re.compile(
    rb"(?:\.weight_loader\s*=(?!=)|[\"']weight_loader[\"']\s*:|\bweight_loader=(?!=)"
    rb"|setattr\([^,\n]+,\s*[\"']weight_loader[\"']\s*,)[\s(]*([^\n]*)"
)
_WORD = re.compile(rb"[A-Za-z_]\w*")


@dataclass(frozen=True, eq=False)
class Function:
    """A function, method or lambda; `owner` is the class of a method."""

    source: "Source"
    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    name: str
    owner: "Class | None" = None

    @cached_property
    def arguments(self) -> list[ast.arg]:
        return [*self.node.args.posonlyargs, *self.node.args.args, *self.node.args.kwonlyargs]

    @cached_property
    def statements(self) -> list[ast.stmt]:
        return [] if isinstance(self.node, ast.Lambda) else list(_statements(self.node.body))

    @cached_property
    def locals(self) -> dict[str, list[ast.expr]]:
        """What each local name is ever: the values it gets, its annotation and its default."""
        found: dict[str, list[ast.expr]] = {}
        for target, value in _assignments(self.statements):
            if isinstance(target, ast.Name):
                found.setdefault(target.id, []).append(value)
        for name, default in self.defaults.items():
            found.setdefault(name, []).append(default)
        for each in self.arguments:
            if each.annotation:
                found.setdefault(each.arg, []).append(each.annotation)
        return found

    @cached_property
    def inner(self) -> "dict[str, Function]":
        """The functions defined inside, by name."""
        defined = [node for node in self.statements if isinstance(node, _FUNCTIONS)]
        return {node.name: Function(self.source, node, f"{self.name}.{node.name}") for node in defined}

    @cached_property
    def returned(self) -> list[ast.expr]:
        return [node.value for node in self.statements if isinstance(node, ast.Return) and node.value]

    @cached_property
    def defaults(self) -> dict[str, ast.expr]:
        """The default of each argument that has one."""
        given = self.node.args
        names = [each.arg for each in [*given.posonlyargs, *given.args]]
        found = dict(zip(reversed(names), reversed(given.defaults), strict=False))
        keywords = zip(given.kwonlyargs, given.kw_defaults, strict=True)
        return found | {each.arg: value for each, value in keywords if value}

    @cached_property
    def declares(self) -> list[tuple[str, ast.expr]]:
        """The attributes that a method gives the object it is called on, with what they get."""
        me = self.arguments[0].arg if self.arguments else ""
        found = [
            (target.attr, value)
            for target, value in _assignments(self.statements)
            if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == me
        ]
        for node in self.statements:
            match node:
                case ast.Expr(
                    value=ast.Call(
                        func=ast.Attribute(value=ast.Name(id), attr="register_parameter" | "register_buffer"),
                        args=[ast.Constant(str(name)), *_],
                    ) as call
                ) if id == me:
                    found.append((name, call))
        return found

    @property
    def decorators(self) -> set[str]:
        found = [] if isinstance(self.node, ast.Lambda) else self.node.decorator_list
        return {ast.unparse(decorator).rsplit(".", 1)[-1] for decorator in found}

    @property
    def is_loader(self) -> bool:
        """Whether it is a weight loader: by its name, or because its file attaches it to a parameter as one."""
        plain = self.name.rsplit(".", 1)[-1]
        return "weight_loader" in plain or plain in self.source.loaders


@dataclass(frozen=True, eq=False)
class Class:
    """A class; `name` is qualified by what it stands in."""

    source: "Source"
    node: ast.ClassDef
    name: str

    @cached_property
    def methods(self) -> dict[str, Function]:
        return {
            node.name: Function(self.source, node, f"{self.name}.{node.name}", self)
            for node in self.node.body
            if isinstance(node, _FUNCTIONS)
        }

    @cached_property
    def given(self) -> dict[str, list[ast.expr]]:
        """What the body of the class gives each name, annotations too."""
        found: dict[str, list[ast.expr]] = {}
        for target, value in _assignments(self.node.body):
            if isinstance(target, ast.Name):
                found.setdefault(target.id, []).append(value)
        return found

    @cached_property
    def attributes(self) -> dict[str, list[tuple[ast.expr, Function | None]]]:
        """Every expression that declares an attribute, with the method it stands in: values and annotations."""
        found: dict[str, list[tuple[ast.expr, Function | None]]] = {
            name: [(value, None) for value in values] for name, values in self.given.items()
        }
        for method in self.methods.values():
            for name, value in method.declares:
                found.setdefault(name, []).append((value, method))
        return found


class Source:
    """One parsed file. `name` is its dotted module name."""

    def __init__(self, path: str, name: str, data: bytes):
        self.path, self.name = path, name
        self.functions: dict[str, Function] = {}
        self.classes: dict[str, Class] = {}
        #: Those too that share a name, as classes made by functions do.
        self.every_class: list[Class] = []
        #: What an imported name stands for: a module, or a name in a module.
        self.imported: dict[str, tuple[str, str | None]] = {}
        #: Names that some parameter of this file may get as its weight loader.
        self.loaders = {name.decode() for found in _ATTACHED.findall(data) for name in _WORD.findall(found)}
        try:
            body = ast.parse(data).body
        except SyntaxError as error:
            raise ForkError(f"{path}: line {error.lineno}: {error.msg}; it takes a newer Python to read it") from None
        self._index(body, "")
        self.assigned = {
            target.id: value for target, value in _assignments(_statements(body)) if isinstance(target, ast.Name)
        }

    def _index(self, body: list[ast.stmt], prefix: str) -> None:
        """Enter what `body` defines: functions of the module by name, classes and imports wherever they stand."""
        for node in body:
            if isinstance(node, ast.ClassDef):
                cls = Class(self, node, prefix + node.name)
                self.every_class.append(cls)
                self.classes.setdefault(node.name, cls)
                self._index(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, _FUNCTIONS):
                if not prefix:
                    self.functions[node.name] = Function(self, node, node.name)
                self._index(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.Import | ast.ImportFrom):
                self._import(node)
            else:
                for inner in _bodies(node):
                    self._index(inner, prefix)

    def _import(self, node: ast.Import | ast.ImportFrom) -> None:
        for alias in node.names:
            if isinstance(node, ast.Import):
                whole = alias.name if alias.asname else alias.name.split(".")[0]
                self.imported[alias.asname or whole] = (whole, None)
            else:
                self.imported[alias.asname or alias.name] = (self._absolute(node), alias.name)

    def _absolute(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        package = self.name.split(".") if self.path.endswith("/__init__.py") else self.name.split(".")[:-1]
        return ".".join([*package[: len(package) - node.level + 1], *([node.module] if node.module else [])])


#: What a name can stand for: something of the tree, an expression to evaluate there, or a dotted name outside it.
Meaning = Function | Class | Source | tuple[Source, ast.expr] | str


class Sources:
    """Every file that `read` has, found by module name."""

    def __init__(self, read: Reader):
        self._read = read
        self._known: dict[str, Source | None] = {}
        self._orders: dict[Class, tuple[Class, ...]] = {}

    def get(self, name: str) -> Source | None:
        """The module called `name` if the tree has it."""
        if name not in self._known:
            self._known[name] = None
            if name.split(".")[0] == "vllm":
                stem = name.replace(".", "/")
                for path in (f"{stem}/__init__.py", f"{stem}.py"):
                    if (data := self._read(path)) is not None:
                        self._known[name] = Source(path, name, data)
                        break
        return self._known[name]

    def family(self, source: Source) -> list[Source]:
        """The files of the model that `source` belongs to, of those that were asked for: its folder, or it alone."""
        if source.name.startswith(_FLAT):
            return [source]
        stem = ".".join(source.name.split(".")[:3])
        return [each for name, each in sorted(self._known.items()) if each and f"{name}.".startswith(f"{stem}.")]

    def meaning(self, source: Source, name: str, depth: int = 8) -> Meaning | None:
        """What `name` stands for in `source`, through imports. None for a name it does not define."""
        if found := source.functions.get(name) or source.classes.get(name):
            return found
        if name in source.assigned:
            return source, source.assigned[name]
        if name not in source.imported or not depth:
            return None
        module, member = source.imported[name]
        if member is None:
            return self.get(module) or module
        if found_source := self.get(module):
            inner = self.meaning(found_source, member, depth - 1)
            if inner is not None:
                return inner
        return self.get(f"{module}.{member}") or f"{module}.{member}"

    def class_of(self, source: Source, node: ast.expr) -> Class | None:
        """The class that the expression `node` names."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node = ast.Name(node.value)
        meaning: Meaning | None = None
        if isinstance(node, ast.Name):
            meaning = self.meaning(source, node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module = self.meaning(source, node.value.id)
            meaning = self.meaning(module, node.attr) if isinstance(module, Source) else None
        elif isinstance(node, ast.Subscript):
            return self.class_of(source, node.value)
        if isinstance(meaning, tuple):
            meaning = self.class_of(*meaning) if not isinstance(meaning[1], ast.Call) else None
        return meaning if isinstance(meaning, Class) else None

    def order(self, cls: Class) -> tuple[Class, ...]:
        """`cls` and its bases, nearest first."""
        if cls not in self._orders:
            self._orders[cls] = (cls,)
            bases = (self.class_of(cls.source, base) for base in cls.node.bases)
            lines = [self.order(base) for base in bases if base]
            self._orders[cls] = tuple(dict.fromkeys([cls, *(found for line in lines for found in line)]))
        return self._orders[cls]

    def method(self, cls: Class, name: str, after: Class | None = None) -> Function | None:
        """What `name` calls on an instance of `cls`; with `after`, what `super()` finds in a method of that class."""
        order = self.order(cls)
        if after in order:
            order = order[order.index(after) + 1 :]
        for base in order:
            if name in base.methods:
                return base.methods[name]
            for value in base.given.get(name, ()):
                if isinstance(value, ast.Attribute) and (other := self.class_of(base.source, value.value)):
                    return self.method(other, value.attr)
        return None

    def attribute(self, cls: Class, name: str) -> list[tuple[ast.expr, Function | None, Source]]:
        """Every expression that declares attribute `name` of an instance of `cls`."""
        return [(*found, base.source) for base in self.order(cls) for found in base.attributes.get(name, ())]


def module_name(path: str) -> str:
    """The dotted name of the module at `path`."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _bodies(node: ast.stmt) -> Iterator[list[ast.stmt]]:
    """The blocks of statements that a statement has."""
    for name in ("body", "orelse", "finalbody"):
        yield getattr(node, name, [])
    for inner in [*getattr(node, "handlers", []), *getattr(node, "cases", [])]:
        yield inner.body


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Every statement in `body`, those inside others too, but not those of functions and classes defined there."""
    for node in body:
        yield node
        if not isinstance(node, _FUNCTIONS | ast.ClassDef):
            for inner in _bodies(node):
                yield from _statements(inner)


def _assignments(nodes: Iterable[ast.stmt]) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Target and value of each assignment, tuples taken apart or given whole; an annotation counts as a value."""
    for node in nodes:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                parts = target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
                values = node.value.elts if isinstance(node.value, ast.Tuple) else []
                paired = values if len(values) == len(parts) else [node.value] * len(parts)
                yield from zip(parts, paired, strict=True)
        elif isinstance(node, ast.AnnAssign):
            yield node.target, node.annotation
            if node.value:
                yield node.target, node.value
