"""Search a tree for tensors that are bound after weights are loaded, or once by forward."""

import ast
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from fork.evaluate import Reader
from fork.rebinds.evaluate import Evaluator, Scope
from fork.rebinds.places import Place, is_module, places, refreshed
from fork.rebinds.reads import Reads, functions
from fork.rebinds.values import HOLDERS, NEW, Kind, Value
from fork.writes.attributes import declared
from fork.writes.frames import shown
from fork.writes.sources import Class, Function, Sources, module_name

#: What runs after weights are loaded, or as the end of that.
_HOOK = re.compile(
    r"\w*process_weights_after_loading|load_weights|post_weight_load|_?finalize_\w*(?:weights|load|loading)|post_load\w*"
)
#: What makes an object, or loads one weight: not followed, and what it binds is bound once.
_CONSTRUCTION = re.compile(
    r"__init__|__post_init__|__new__|create_weights|get_quant_method|reset_parameters|\w*weight_loader\w*"
)
#: What runs in forward, also where loading weights calls it.
_FORWARD = re.compile(r"_*(?:forward|apply|run|call)")

#: Text without which a file has no hook, and a function no cache.
_HOOKS = re.compile(
    rb"def (?:\w*process_weights_after_loading|load_weights|post_weight_load|post_load|_?finalize_)"
    rb"|cached_property|_cache\b"
)
_CACHE = re.compile(
    rb"if not hasattr\(|\w\.\w+ is (?:not )?None|\b(\w+)\.(\w+) = \1\.\2\.|not in self\.|getattr\([\w.]+, \"_"
    rb"|if not self\.\w+:|if self\.\w+:\s+return"
)
_CACHES = {"cached_property", "cache", "lru_cache"}
_MACHINERY = "vllm.model_executor.model_loader."


@dataclass(frozen=True, order=True)
class Rebind:
    """One tensor that an update may leave behind: where it is bound, how, and to what."""

    file: str
    line: int
    owner: str
    attribute: str
    how: str
    value: str


class Search:
    """What the files at `paths` bind; `read` reads any file of the tree."""

    def __init__(self, paths: Iterable[str], read: Reader):
        texts = {path: data for path in sorted(paths) if (data := read(path)) is not None}
        self._files = [path for path, data in texts.items() if _HOOKS.search(data) or _CACHE.search(data)]
        self._lines = {path: texts[path].splitlines() for path in self._files}
        self._sources = Sources(read)
        self._reads = Reads(self._sources, texts)
        self._weights = declared(texts.values())
        self._followed: set[Scope] = set()
        self._found: set[tuple[Rebind, Class | None]] = set()

    def run(self) -> list[Rebind]:
        """Every tensor that is bound so and that is read elsewhere; sorted.

        Raises ForkError for a file that this Python cannot parse.
        """
        sources = [source for path in self._files if (source := self._sources.get(module_name(path)))]
        classes = [cls for source in sources for cls in source.every_class]
        everything = [each for source in sources for each in functions(source)]
        evaluator = Evaluator(self._sources, self._weights, classes)
        for function, cls in everything:
            if _HOOK.fullmatch(_plain(function)):
                self._follow(evaluator, Scope(function, cls))
        followed = {scope.function.node for scope in self._followed}

        def loads(function: Function) -> bool:
            return not _FORWARD.match(_plain(function)) and (
                function.node in followed or bool((_HOOK.fullmatch(_plain(function))) or _constructs(function))
            )

        # What forward keeps of a number that loading read from a tensor is as old as the number.
        hosts = frozenset(each.attribute for each, _ in self._found if each.how.endswith(" host"))
        evaluator = Evaluator(self._sources, self._weights, classes, hosts)
        for function, cls in everything:
            if self._may_cache(function) and not loads(function):
                self._caches(evaluator, Scope(function, cls))
        return self._used(loads)

    def _used(self, loads: Callable[[Function], bool]) -> list[Rebind]:
        used = self._reads.of([(each.attribute, cls) for each, cls in self._found], self._files, loads)
        return sorted({each for each, cls in self._found if (each.attribute, cls) in used})

    def _may_cache(self, function: Function) -> bool:
        """Whether the text of `function` has what every cache has."""
        lines = self._lines[function.source.path][function.node.lineno - 1 : function.node.end_lineno]
        return bool(_CACHE.search(b"\n".join(lines)) or function.decorators & _CACHES)

    def _follow(self, evaluator: Evaluator, root: Scope) -> None:
        """Note what is bound after loading, in `root` and in what it calls."""
        todo = [root]
        while todo:
            scope = todo.pop()
            if scope in self._followed or scope.function.is_loader or scope.source.name.startswith(_MACHINERY):
                continue
            self._followed.add(scope)
            for place in places(evaluator, scope):
                if not refreshed(evaluator, scope, place):
                    self._note(evaluator, scope, place, "post-load", place.value & (NEW | {Kind.HOST}))
            body = evaluator.body(scope.function)
            todo += [Scope(evaluator.inner(node, scope), scope.owner, outer=scope) for node in body.inner.values()]
            for node in body.calls:
                called = (each for each in evaluator.called(node, scope) if not _constructs(each.function))
                todo += [each for each in called if not _FORWARD.match(_plain(each.function))]

    def _caches(self, evaluator: Evaluator, scope: Scope) -> None:
        """Note what is computed once from a weight."""
        kept = {Kind.DERIVED, Kind.PARAMETER, Kind.HOLDER, Kind.HOST}
        for place in places(evaluator, scope):
            when = _once(evaluator, scope, place)
            if when and not refreshed(evaluator, scope, place):
                self._note(evaluator, scope, place, when, place.value & kept)
        node = scope.function.node
        if scope.function.decorators & _CACHES and not isinstance(node, ast.Lambda):
            value = evaluator.result(scope) & {Kind.DERIVED, Kind.HOLDER}
            if value and (returned := scope.function.returned):
                place = Place(node, ast.Name(scope.me), node.name, returned[-1], value, True)
                self._note(evaluator, scope, place, "lazy-cache", value)

    def _note(self, evaluator: Evaluator, scope: Scope, place: Place, when: str, value: Value) -> None:
        if not value or (place.registered and not place.own):
            return
        owner = scope.function.owner or (scope.outer.function.owner if scope.outer else None)
        rebind = Rebind(
            scope.source.path,
            place.node.lineno,
            owner.name if owner else f"{scope.function.name}()",
            place.attribute,
            f"{when} {self._holder(evaluator, scope, place, value)}",
            _described(place.source),
        )
        self._found.add((rebind, scope.owner if place.own else None))

    def _holder(self, evaluator: Evaluator, scope: Scope, place: Place, value: Value) -> str:
        """What holds the value."""
        if value == {Kind.HOST}:
            return "host"
        if value <= HOLDERS | {Kind.HOST}:
            return "capture"
        classes = evaluator.classes(place.target, scope)
        return "helper" if classes and not any(is_module(self._sources, cls) for cls in classes) else "module"


def _described(node: ast.expr) -> str:
    """The expression that gives the value, in few words: of a call what is called."""
    if isinstance(node, ast.Call) and (node.args or node.keywords):
        node = ast.Call(node.func, [ast.Constant(...)], [])
    return shown(node)


def _plain(function: Function) -> str:
    return function.name.rsplit(".", 1)[-1]


def _constructs(function: Function) -> bool:
    return bool(_CONSTRUCTION.fullmatch(_plain(function)))


def _once(evaluator: Evaluator, scope: Scope, place: Place) -> str:
    """How a binding outside loading happens only once; empty where it happens each time."""
    whole = f"{ast.unparse(place.target)}.{place.attribute}"
    if any(isinstance(each, ast.Attribute) and ast.unparse(each) == whole for each in ast.walk(place.source)):
        return "first-forward" if place.value & NEW else ""
    flags: set[str] = set()
    tested: set[str] = set()
    for node in evaluator.body(scope.function).nodes:
        match node:
            case (
                ast.Compare(left=ast.Attribute(attr=name), ops=[ast.Is() | ast.IsNot()])
                | ast.Compare(ops=[ast.In() | ast.NotIn()], comparators=[ast.Attribute(attr=name)])
                | ast.Call(func=ast.Name("hasattr" | "getattr"), args=[_, ast.Constant(name), *_])
            ) if name == place.attribute:
                return "lazy-cache"
            case ast.If(test=test):
                tested |= {each.attr for each in ast.walk(test) if isinstance(each, ast.Attribute)}
            case ast.Assign(targets=[ast.Attribute(attr=name)], value=ast.Constant(True | False)):
                flags.add(name)
    return "first-forward" if flags & tested and place.value & NEW else ""
