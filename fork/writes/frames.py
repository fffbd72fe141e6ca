"""One call that the data flow follows, and the name it gives to what is written there."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from fork.writes.sources import Class, Function, Source
from fork.writes.values import Owned, Value, join


@dataclass(frozen=True, order=True)
class Write:
    """One place that writes `parameter`; `how` is the kind of write."""

    file: str
    line: int
    function: str
    parameter: str
    how: str


@dataclass(eq=False)
class Frame:
    """One call that is being followed.

    `variables` is what each variable is here; `ever` what it is at any time, which is what a nested function sees.
    `tests` are the conditions that hold here, each with whether it is true; `jumps` the variables at each `break` and
    `continue` of the loops that are open.
    """

    function: Function
    outer: "Frame | None" = None
    receiver: Owned | None = None
    variables: dict[str, Value] = field(default_factory=dict)
    ever: dict[str, Value] = field(default_factory=dict)
    tests: list[tuple[ast.expr, bool]] = field(default_factory=list)
    returned: Value = ()
    yielded: list[Value] = field(default_factory=list)
    jumps: list[list[tuple[ast.stmt, dict[str, Value]]]] = field(default_factory=list)

    @property
    def source(self) -> Source:
        return self.function.source

    @property
    def owner(self) -> Class | None:
        """The class of the method that this call is, or is nested in."""
        return self.function.owner or (self.outer.owner if self.outer else None)

    @property
    def me(self) -> Owned | None:
        """What the method that this call is, or is nested in, was called on."""
        return self.receiver or (self.outer.me if self.outer else None)

    def set(self, name: str, value: Value) -> None:
        self.variables[name] = value
        self.ever[name] = join(self.ever.get(name, ()), value)

    def find(self, name: str) -> Value | None:
        """What the local variable `name` is, here or in the calls around; None where there is none."""
        if name in self.variables:
            return self.variables[name]
        outer = self.outer
        while outer:
            if name in outer.ever:
                return outer.ever[name]
            outer = outer.outer
        return None

    def label(self, atom: Owned) -> str:
        """The best name for `atom` here: where it was looked up by a variable, what the conditions say of that."""
        if not atom.keys:
            return atom.path
        said = [each for test, truth in reversed(self.tests) if (each := _said(test, truth))]
        about = [text for text, names, _ in said if names & set(atom.keys)]
        other = [text for text, _, exact in said if not exact]
        return next(iter(about + other), atom.path)

    def named(self, atom: Owned, key: ast.expr, names: list[str]) -> Owned:
        """`atom`, one of many, as it is found under `key`, which is one of `names` where they are known."""
        if names:
            return replace(atom, path="|".join(names), keys=())
        variables = tuple(sorted({each.id for each in ast.walk(key) if isinstance(each, ast.Name)}))
        found = replace(atom, path=shown(key), keys=variables)
        return replace(found, path=self.label(found))


def shown(node: ast.expr) -> str:
    """An expression as it reads in a list: short, and a string without its quotes."""
    text = " ".join(ast.unparse(node).split())
    if isinstance(node, ast.Constant | ast.JoinedStr):
        text = text.removeprefix("f").strip("'\"")
    return text if len(text) <= 60 else f"{text[:57]}..."


def either(*branches: dict[str, Value]) -> dict[str, Value]:
    """The variables after one of several branches."""
    names = dict.fromkeys(name for branch in branches for name in branch)
    return {name: join(*(branch.get(name, ()) for branch in branches)) for name in names}


#: What a condition says of a name: the string it must have, the variables it is about, whether it is that string.
_Saying = tuple[str, set[str], bool]


def _said(test: ast.expr, truth: bool) -> _Saying | None:
    """What `test` says of a name where it is true, or with `truth` unset false."""
    match test:
        case ast.UnaryOp(op=ast.Not(), operand=inner):
            return _said(inner, not truth)
        case ast.BoolOp(op=op, values=values):
            said = [each for value in values if (each := _said(value, truth))]
            mark = " & " if isinstance(op, ast.And) == truth else "|"
            if not said or (mark == "|" and len(said) < len(values)):
                return None
            return mark.join(text for text, _, _ in said), set().union(*(names for _, names, _ in said)), False
        case ast.Compare(left=left, ops=[ast.In() | ast.NotIn() as op], comparators=[right]):
            literal = left if isinstance(left, ast.Constant) else right
            return _saying(test, literal) if isinstance(op, ast.In) == truth else None
        case ast.Compare(left=left, ops=[ast.Eq() | ast.NotEq() as op], comparators=[right]):
            literal = left if isinstance(left, ast.Constant) else right
            said_so = _saying(test, literal) if isinstance(op, ast.Eq) == truth else None
            return (*said_so[:2], True) if said_so else None
        case ast.Call(func=ast.Attribute(attr="startswith" | "endswith"), args=[literal]) if truth:
            return _saying(test, literal)
        case ast.Call(func=ast.Name("any" | "all"), args=[ast.GeneratorExp() as each]) if truth:
            return _saying(test, each.generators[0].iter)
    return None


def _saying(test: ast.expr, literal: ast.expr) -> _Saying | None:
    texts = list(dict.fromkeys(_strings(literal)))
    names = {each.id for each in ast.walk(test) if isinstance(each, ast.Name)}
    return ("|".join(texts), names, False) if texts else None


def _strings(node: ast.expr) -> Iterator[str]:
    """The strings that a literal is, or is a list of."""
    for each in [node, *getattr(node, "elts", ())]:
        if isinstance(each, ast.Constant) and isinstance(each.value, str):
            yield each.value
