"""Which attributes are read, and by which classes."""

import ast
import re
from collections.abc import Callable, Iterable, Iterator, Mapping

from fork.writes.sources import Class, Function, Source, Sources, module_name

#: An attribute by its name, and the class of the object where that is known.
Wanted = tuple[str, Class | None]


class Reads:
    """Finds what the files `texts` read; a file is parsed where its text has a name that is looked for."""

    def __init__(self, sources: Sources, texts: Mapping[str, bytes]):
        self._sources, self._texts = sources, texts

    def of(self, wanted: Iterable[Wanted], first: Iterable[str], skip: Callable[[Function], bool]) -> set[Wanted]:
        """Those of `wanted` that a function reads which `skip` does not leave out; the files `first` are read first."""
        found = {(name, cls) for name, cls in wanted if name.startswith("<")}
        pending = set(wanted) - found
        for path in dict.fromkeys([*first, *self._texts]):
            text = self._texts[path]
            named = _pattern({name for name, _ in pending})
            if not named.search(text) or not (source := self._sources.get(module_name(path))):
                continue
            lines = [bool(named.search(line)) for line in text.splitlines()]
            for function, cls in functions(source):
                if any(lines[function.node.lineno - 1 : function.node.end_lineno]) and not skip(function):
                    read = dict.fromkeys(_read(function.node))
                    found |= {each for each in pending if self._is_read(each, read, cls)}
            pending -= found
        return found

    def _is_read(self, wanted: Wanted, read: Mapping[tuple[str, bool], None], reader: Class | None) -> bool:
        """Whether `read` has it: from any object, or in a method of a class of the same family from its own."""
        name, cls = wanted
        if (name, False) in read:
            return True
        if (name, True) not in read:
            return False
        if cls is None or reader is None:
            return True
        return not set(self._sources.order(cls)).isdisjoint(self._sources.order(reader))


def functions(source: Source) -> Iterator[tuple[Function, Class | None]]:
    """Every function and method of a file, with the class of a method."""
    for function in source.functions.values():
        yield function, None
    for cls in source.every_class:
        for method in cls.methods.values():
            yield method, cls


def _pattern(names: Iterable[str]) -> re.Pattern[bytes]:
    return re.compile(rb"(?:\.|\")(?:" + "|".join(sorted(map(re.escape, names))).encode() + rb")\b")


def _read(node: ast.AST) -> Iterator[tuple[str, bool]]:
    """The name of each attribute that is read, and whether from the object that the method is called on."""
    for each in ast.walk(node):
        match each:
            case ast.Attribute(value=value, attr=name, ctx=ast.Load()):
                yield name, isinstance(value, ast.Name) and value.id == "self"
            case ast.Call(func=ast.Name("getattr"), args=[_, ast.Constant(str(name)), *_]):
                yield name, False
