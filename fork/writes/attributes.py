"""What the attributes of a class hold, by how the class declares them."""

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace

from fork.writes.sources import Class, Function, Source, Sources
from fork.writes.values import TENSORS, Kind, Owned

#: Attributes of a tensor that are views of it.
VIEWS = frozenset({"data", "T", "mT", "H", "mH", "real", "imag"})

#: Attributes that hold no tensor and no module, whatever they are of.
_NOTHING = frozenset({"shape", "dtype", "device", "ndim", "is_meta", "weight_loader", "__class__", "__dict__"})

_CONTAINERS = frozenset({"dict", "list", "set", "tuple", "frozenset", "defaultdict", "OrderedDict", "deque", "Counter"})
_NUMBERS = frozenset({"int", "float", "bool", "str", "bytes", "Callable", "range", "len"})
_DISPLAYS = (ast.Dict, ast.List, ast.Set, ast.Tuple, ast.ListComp, ast.SetComp, ast.DictComp, ast.JoinedStr)

#: How a parameter and a buffer are declared, whatever holds them.
_PARAMETER = re.compile(
    rb"\bself\.(\w+)\s*(?::[^=\n]*)?=\s*(?:(?:torch\.)?nn\.)?Parameter\(|register_parameter\(\s*[\"'](\w+)"
)
_BUFFER = re.compile(rb"register_buffer\(\s*[\"'](\w+)")


def declared(texts: Iterable[bytes]) -> dict[str, Kind]:
    """The names that the files `texts` declare as parameters and buffers."""
    parameters: dict[str, Kind] = {}
    buffers: dict[str, Kind] = {}
    for text in texts:
        parameters |= {(one or two).decode(): Kind.PARAMETER for one, two in _PARAMETER.findall(text)}
        buffers |= {name.decode(): Kind.BUFFER for name in _BUFFER.findall(text)}
    return buffers | parameters


class Attributes:
    """Kinds and classes of attributes. `names` are those that any model declares as a parameter or a buffer."""

    def __init__(self, sources: Sources, names: dict[str, Kind]):
        self._sources, self._names = sources, names
        self._known: dict[tuple[Class, str], tuple[Kind | None, tuple[Class, ...]]] = {}

    def of(self, atom: Owned, name: str) -> Owned:
        """What `atom.name` is."""
        if atom.kind in TENSORS:
            return atom if name in VIEWS else Owned(f"{atom.path}.{name}", Kind.PLAIN)
        if name in VIEWS:
            return replace(atom, kind=Kind.PARAMETER) if name == "data" and atom.kind is Kind.UNKNOWN else atom
        if atom.kind is Kind.PLAIN or name in _NOTHING:
            return Owned(f"{atom.path}.{name}", Kind.PLAIN)
        declared = [self._declared(cls, name) for cls in atom.classes]
        kinds = {kind for kind, _ in declared if kind}
        classes = tuple(dict.fromkeys(cls for _, found in declared for cls in found))
        if not kinds:
            kinds = {self._names.get(name, Kind.UNKNOWN)}
        return Owned(f"{atom.path}.{name}", _likeliest(kinds), classes)

    def declares(self, atom: Owned, name: str) -> bool:
        """Whether a class that `atom` may be of declares `name` as a parameter."""
        return any(self._declared(cls, name)[0] is Kind.PARAMETER for cls in atom.classes)

    def _declared(self, cls: Class, name: str) -> tuple[Kind | None, tuple[Class, ...]]:
        """How `cls` declares `name`; no kind where it does not."""
        if (cls, name) not in self._known:
            self._known[cls, name] = (None, ())
            kinds: set[Kind] = set()
            classes: dict[Class, None] = {}
            for node, method, source in self._sources.attribute(cls, name):
                here = set(self._kinds(source, node, method))
                if not here <= set(TENSORS):
                    classes |= dict.fromkeys(self.classes(cls, source, node, method))
                kinds |= here
            self._known[cls, name] = (_likeliest(kinds) if kinds else None, tuple(classes))
        return self._known[cls, name]

    def _kinds(self, source: Source, node: ast.expr, method: Function | None, depth: int = 3) -> Iterator[Kind]:
        """What the declaring expression `node` shows: a value, an annotation, or the call that registers it."""
        match node:
            case ast.Constant(value):
                if isinstance(value, str) and value.isidentifier():
                    yield Kind.UNKNOWN
                elif value is not None:
                    yield Kind.PLAIN
            case ast.BinOp(left, ast.BitOr(), right):
                yield from self._kinds(source, left, method, depth)
                yield from self._kinds(source, right, method, depth)
            case ast.IfExp(_, left, right):
                yield from self._kinds(source, left, method, depth)
                yield from self._kinds(source, right, method, depth)
            case ast.Call(func=ast.Name(name)) if depth and (called := self._function(source, name, method)):
                yield from self._given(called, depth - 1)
            case ast.Call(func):
                yield self._made(source, func)
            case ast.Subscript(value=inner):
                if ast.unparse(inner) == "Optional":
                    yield from self._kinds(source, node.slice, method, depth)
                else:
                    yield self._made(source, inner)
            case ast.Name(name) if depth and method and (found := method.locals.get(name)):
                for each in found:
                    yield from self._kinds(source, each, method, depth - 1)
            case ast.Name() | ast.Attribute():
                yield self._made(source, node)
            case _ if isinstance(node, _DISPLAYS):
                yield Kind.PLAIN
            case _:
                yield Kind.UNKNOWN

    def _function(self, source: Source, name: str, method: Function | None) -> Function | None:
        """The function that `name` stands for in `method`."""
        meaning = method.inner.get(name) if method else None
        return meaning or (found if isinstance(found := self._sources.meaning(source, name), Function) else None)

    def _given(self, function: Function, depth: int) -> Iterator[Kind]:
        """What a call of `function` gives: what it says or, where that leaves it open, what it returns."""
        says = None if isinstance(function.node, ast.Lambda) else function.node.returns
        if says and "Parameter" in ast.unparse(says):
            yield Kind.PARAMETER
        for value in function.returned:
            yield from self._kinds(function.source, value, function, depth)
        if not function.returned:
            yield Kind.UNKNOWN

    def _made(self, source: Source, func: ast.expr) -> Kind:
        """What a call of `func`, or an annotation of that name, gives."""
        whole = ast.unparse(func)
        last = whole.rsplit(".", 1)[-1]
        if last == "register_parameter" or last.endswith("Parameter"):
            return Kind.PARAMETER
        if last == "register_buffer":
            return Kind.BUFFER
        if last in _CONTAINERS or last in _NUMBERS or last.lower() in _CONTAINERS:
            return Kind.PLAIN
        if whole.startswith("torch.") and not whole.startswith("torch.nn"):
            return Kind.TENSOR
        return Kind.TENSOR if last == "Tensor" else Kind.UNKNOWN

    def classes(
        self, cls: Class, source: Source, node: ast.expr, method: Function | None, depth: int = 3
    ) -> Iterator[Class]:
        """Every class that the declaring expression `node` names, through local names and methods of `cls` too."""
        for each in ast.walk(node):
            if isinstance(each, ast.Name | ast.Attribute) and (found := self._sources.class_of(source, each)):
                yield found
            if not depth:
                continue
            if isinstance(each, ast.Name):
                for value in method.locals.get(each.id, ()) if method else ():
                    yield from self.classes(cls, source, value, method, depth - 1)
                if made := self._function(source, each.id, method):
                    for value in made.returned:
                        yield from self.classes(cls, made.source, value, made, depth - 1)
            elif isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name) and each.value.id == "self":
                if called := self._sources.method(cls, each.attr):
                    for value in called.returned:
                        yield from self.classes(cls, called.source, value, called, depth - 1)
                else:
                    for value, inside, where in self._sources.attribute(cls, each.attr):
                        yield from self.classes(cls, where, value, inside, depth - 1)


def _likeliest(kinds: set[Kind]) -> Kind:
    """What something is that was seen as each of `kinds`."""
    order = (Kind.PARAMETER, Kind.BUFFER, Kind.UNKNOWN, Kind.TENSOR, Kind.PLAIN)
    return next(kind for kind in order if kind in kinds)
