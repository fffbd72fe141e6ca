"""What an expression can stand for while weights load: the few kinds of value that the data flow tells apart."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import Enum

from fork.writes.sources import Class, Function, Source


class Kind(Enum):
    """What is known of something that a module holds."""

    UNKNOWN = "unknown"  # a module, a tensor, a list of either
    PARAMETER = "parameter"  # a parameter, or a view of one
    BUFFER = "buffer"  # a buffer, or a view of one: a reload treats it as it does a parameter
    TENSOR = "tensor"  # a tensor that is neither
    PLAIN = "plain"  # no tensor: a number, a dictionary, a set


#: What a weight loader fills.
STATE = (Kind.PARAMETER, Kind.BUFFER)
TENSORS = (*STATE, Kind.TENSOR)

#: The `keys` of any one of all that there are.
ANY = ("*",)


@dataclass(frozen=True)
class Owned:
    """Something reached from a module.

    `path` says how. Where it was looked up by an expression and not by attribute, `keys` are the variables of that
    expression, and a condition on one of them names it better than `path` does.
    """

    path: str
    kind: Kind = Kind.UNKNOWN
    classes: tuple[Class, ...] = ()
    keys: tuple[str, ...] = ()

    @property
    def element(self) -> "Owned":
        """One of what it holds; of a tensor a view of it."""
        if self.kind in TENSORS:
            return self
        return replace(self, path=f"{self.path}[*]", kind=Kind.UNKNOWN)


@dataclass(frozen=True)
class Made:
    """A tensor made here, with `parameter` a new Parameter."""

    parameter: bool = False


@dataclass(frozen=True)
class Sent:
    """The checkpoint's: the iterator of weights, a pair of it, a tensor or a view of one."""


@dataclass(frozen=True)
class Text:
    """A string that stands in the source."""

    value: str


@dataclass(frozen=True)
class Tuple:
    """Several values, each by its position."""

    items: tuple["Value", ...]


@dataclass(frozen=True)
class Many:
    """A list, a set, an iterator: `item` is any of what it holds."""

    item: "Value"


@dataclass(frozen=True)
class Table:
    """A dictionary: `item` is any of its values."""

    item: "Value"


@dataclass(frozen=True)
class Code:
    """A function to call, with the arguments it has already; `scope` is the call it was defined in."""

    function: Function
    bound: tuple["Value", ...] = ()
    named: tuple[tuple[str, "Value"], ...] = ()
    scope: object = None


@dataclass(frozen=True)
class Type:
    """A class of the tree."""

    cls: Class


@dataclass(frozen=True)
class Module:
    """A module of the tree."""

    source: Source


@dataclass(frozen=True)
class Outside:
    """Something that is not of the tree, by its dotted name: `torch.cat`, `getattr`."""

    name: str


Atom = Owned | Made | Sent | Text | Tuple | Many | Table | Code | Type | Module | Outside

#: Everything an expression can stand for, in a fixed order. Empty: nothing that matters here.
Value = tuple[Atom, ...]

#: More than this and an expression stands for anything; only odd code gets there.
_MOST = 64


def join(*values: Value) -> Value:
    """Either of `values`."""
    return tuple(dict.fromkeys(atom for value in values for atom in value))[:_MOST]


def items(value: Value) -> Value:
    """What iterating or indexing `value` gives."""
    found: list[Value] = []
    for atom in value:
        match atom:
            case Owned():
                found.append((atom.element,))
            case Sent() | Made():
                found.append((atom,))
            case Many(item) | Table(item):
                found.append(item)
            case Tuple(parts):
                found.extend(parts)
    return join(*found)


def part(value: Value, index: int, of: int) -> Value:
    """What position `index` of `of` gets where `value` is taken apart."""
    found: list[Value] = []
    for atom in value:
        if isinstance(atom, Tuple) and len(atom.items) == of:
            found.append(atom.items[index])
        elif not isinstance(atom, Tuple):
            found.append(items((atom,)))
    return join(*found)


def texts(value: Value) -> list[str]:
    """The strings it can be; empty unless it is always one of a few that stand in the source."""
    found = sorted(atom.value for atom in value if isinstance(atom, Text))
    return found if len(found) == len(value) <= 8 else []


def owned(value: Value) -> Iterator[Owned]:
    """Everything of a module that `value` is or holds."""
    for atom in value:
        match atom:
            case Owned():
                yield atom
            case Many(item) | Table(item):
                yield from owned(item)
            case Tuple(parts):
                for inner in parts:
                    yield from owned(inner)


def reaches(values: Iterable[Value]) -> bool:
    """Whether anything in `values` can lead to a module: only then is a call worth following."""
    return any(isinstance(atom, Code) or any(True for _ in owned((atom,))) for value in values for atom in value)


def classed(value: Value, classes: tuple[Class, ...]) -> Value:
    """`value` where it has shown to be of one of `classes`; a class that is known already stands."""
    return tuple(
        replace(atom, classes=classes)
        if isinstance(atom, Owned) and not atom.classes and atom.kind is Kind.UNKNOWN
        else atom
        for atom in value
    )


def known_as(value: Value, name: str, receiver: bool) -> Value:
    """`value` as a function sees it that calls it `name`: modules by that name, parameters by the one they have.

    What was looked up by an expression keeps its name too, but for the `receiver` of a method, which is no parameter.
    """

    def known(atom: Atom) -> Atom:
        if not isinstance(atom, Owned) or atom.kind in STATE:
            return atom
        return replace(atom, path=name, keys=()) if receiver or atom.keys in ((), ANY) else atom

    return join(tuple(known(atom) for atom in value))
