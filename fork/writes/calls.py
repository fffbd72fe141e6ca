"""What a call gives and writes: methods of tensors, modules and containers, functions of torch and of Python."""

import ast
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fork.writes.frames import Frame, shown
from fork.writes.values import (
    ANY,
    TENSORS,
    Code,
    Kind,
    Made,
    Many,
    Outside,
    Owned,
    Sent,
    Table,
    Tuple,
    Type,
    Value,
    classed,
    items,
    join,
    texts,
)

if TYPE_CHECKING:
    from fork.writes.dataflow import Flow


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: Methods and functions that give a view of a tensor, and those that give several.
_VIEW = _words(
    "narrow view view_as reshape flatten unflatten ravel squeeze unsqueeze t transpose adjoint permute movedim "
    "moveaxis swapaxes swapdims select diagonal as_strided unfold expand expand_as detach requires_grad_"
)
_VIEWS = _words("unbind chunk split tensor_split hsplit vsplit dsplit split_with_sizes")

#: Methods that end in `_` and write no values.
_HARMLESS = _words("requires_grad_ share_memory_ rename_ retain_grad_")

#: Methods of a module by what they give of it: every tensor, every module, or the one of a name.
_TENSORS = {"named_parameters": "pairs", "named_buffers": "pairs", "parameters": "each", "buffers": "each"}
_MODULES = {"named_modules": "pairs", "named_children": "pairs", "modules": "each", "children": "each"}
_BY_NAME = {"get_parameter": Kind.PARAMETER, "get_buffer": Kind.BUFFER, "get_submodule": Kind.UNKNOWN}

#: Modules of torch that hold what they are given.
_HOLDERS = _words("ModuleDict ModuleList ParameterDict ParameterList")

#: Methods that return the module itself.
_SAME = _words("to half float double bfloat16 cuda cpu eval train")

#: Methods that put their last argument, or what it holds, into a container.
_FILLS = _words("append add appendleft insert setdefault")
_MERGES = _words("extend update")

#: Functions whose result holds what their arguments hold.
_COLLECT = _words("list tuple set frozenset sorted reversed iter chain islice tee deque cycle tqdm")

#: Methods that are no method of a model's own, whatever they are called on.
_GENERAL = frozenset().union(
    *(_VIEW, _VIEWS, _FILLS, _MERGES, _TENSORS, _MODULES, _BY_NAME, _SAME),
    _words("get pop items values keys state_dict load_state_dict apply register_parameter register_buffer"),
    _words("load_weights weight_loader forward __init__"),
)

#: Values whose methods are known by name; a method of any other is looked up as its attribute.
_OBJECTS = Owned | Sent | Made | Many | Table


@dataclass(frozen=True)
class _Call:
    """A call with the values of its arguments."""

    flow: "Flow"
    frame: Frame
    node: ast.Call
    positional: list[Value]
    named: dict[str, Value]

    @property
    def first(self) -> Value:
        return self.positional[0] if self.positional else ()

    def note(self, how: str, value: Value) -> None:
        """Note that this writes `value`, whatever it is of a module."""
        self.flow.note(self.frame, self.node, how, value, sure=False)

    def follow(self, code: Code) -> Value:
        """What `code` gives. A weight loader called by its own name need not be the parameter's current one."""
        if code.function.is_loader and len(self.positional) + len(self.named) > 1:
            receiver = self.node.func.value if isinstance(self.node.func, ast.Attribute) else None
            given = [*zip(self.node.args[:1], self.positional, strict=False)]
            given += [(each.value, self.named["param"]) for each in self.node.keywords if each.arg == "param"]
            for node, value in given:
                if receiver is None or ast.dump(node) != ast.dump(receiver):
                    self.note("direct-loader", tuple(atom for atom in value if isinstance(atom, Owned)))
        return self.flow.invoke(code, self.positional, self.named)


def evaluate_call(flow: "Flow", frame: Frame, node: ast.Call) -> Value:
    """What `node` gives; follows the function it calls, and notes what it writes."""
    func = node.func
    receiver: Value = ()
    if isinstance(func, ast.Attribute) and not _is_super(func.value):
        receiver = flow.evaluate(frame, func.value)
    positional = [
        items(flow.evaluate(frame, each.value)) if isinstance(each, ast.Starred) else flow.evaluate(frame, each)
        for each in node.args
    ]
    named = {each.arg or "": flow.evaluate(frame, each.value) for each in node.keywords}
    call = _Call(flow, frame, node, positional, named)
    if "out" in call.named:
        call.note("out", call.named["out"])
    if not isinstance(func, ast.Attribute):
        found = [_function(call, each) for each in flow.evaluate(frame, func)]
    elif _is_super(func.value):
        found = [_super(call, func.attr)]
    else:
        other = tuple(atom for atom in receiver if not isinstance(atom, _OBJECTS))
        found = [_method(call, receiver, func), *(_function(call, each) for each in flow.get(func, other))]
    if all(isinstance(atom, Made) for value in found for atom in value):
        _run_passed(call)
    return join(*found)


def _function(call: _Call, called: object) -> Value:
    """A call of what a name or an attribute stands for."""
    match called:
        case Code():
            return call.follow(called)
        case Type(cls):
            return (Made(True),) if cls.name.endswith("Parameter") else (Owned(cls.name, classes=(cls,)),)
        case Outside(name):
            return _outside(call, name)
        case Owned(kind=Kind.UNKNOWN):
            methods = call.flow.named_like(call.frame, called, called.path.rsplit(".", 1)[-1])
            return join(*(call.follow(each) for each in methods))
    return ()


def _run_passed(call: _Call) -> None:
    """Follow the functions that were passed to one which is not followed itself: it may call them."""
    for value in (*call.positional, *call.named.values()):
        for atom in value:
            if isinstance(atom, Code):
                call.flow.invoke(atom, [], {})


def _is_super(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"


def _super(call: _Call, name: str) -> Value:
    me, owner = call.frame.me, call.frame.owner
    if me and me.classes and owner and (method := call.flow.sources.method(me.classes[0], name, after=owner)):
        return call.follow(Code(method, ((me,),)))
    return ()


def _method(call: _Call, receiver: Value, func: ast.Attribute) -> Value:
    """A call of a method by its name, on what the rules here know."""
    name = func.attr
    if name == "replace" and isinstance(call.node.args[-1], ast.Name) and texts(call.positional[-1]):
        return call.positional[-1]
    if name in _FILLS and call.positional:
        call.flow.fill(call.frame, func.value, call.positional[-1])
    elif name in _MERGES:
        call.flow.fill(call.frame, func.value, items(call.first) if name == "extend" else _values(call.first))
    found: list[Value] = []
    for atom in receiver:
        match atom:
            case Owned():
                found.append(_of_owned(call, atom, name))
            case Sent() | Made():
                if _writes(name):
                    call.flow.note(call.frame, func.value, "in-place", (atom,))
                found.append((atom,))
            case Table(item) if name in ("get", "pop", "setdefault") and call.node.args:
                held = call.flow.look_up(call.frame, item, call.node.args[0], call.first)
                found.append(join(held, *call.positional[1:2]))
            case Many(item) | Table(item) if name in _TENSORS or name in _MODULES:
                found.extend(_of_module(call, each, name) for each in item if isinstance(each, Owned))
            case Many() | Table():
                found.append(_of_container(atom, name))
    if not receiver:
        found.append(_of_module(call, Owned(shown(func.value)), name))
    return join(*found)


def _writes(name: str) -> bool:
    """Whether a function of torch, or a method of a tensor, of this name writes in place."""
    private = name.startswith("_") and not name.startswith("_foreach_")
    return name.endswith("_") and not name.endswith("__") and not private and name not in _HARMLESS


def _of_owned(call: _Call, atom: Owned, name: str) -> Value:
    """A method of something that a module holds."""
    methods = [each for each in call.flow.attribute(atom, name) if isinstance(each, Code)]
    if atom.kind is Kind.UNKNOWN and not methods and name not in _GENERAL:
        methods = call.flow.named_like(call.frame, atom, name)
    if methods:
        return join(*(call.follow(each) for each in methods))
    if _writes(name):
        call.note("in-place", (atom,))
        return (atom,)
    if name in _VIEW | _VIEWS and atom.kind is not Kind.PLAIN:
        return (atom,) if name in _VIEW else (Many((atom,)),)
    if atom.kind in TENSORS:
        return (Made(),)
    if name in ("get", "pop"):
        return join((atom.element,), *call.positional[1:2])
    if name in ("items", "values", "keys"):
        return _of_container(Table((atom.element,)), name)
    return _of_module(call, atom, name)


def _of_module(call: _Call, atom: Owned, name: str) -> Value:
    """A method that only modules have; on anything else it gives nothing."""
    tensor = Owned(f"{atom.path}.*", Kind.PARAMETER, keys=ANY)
    module = Owned(f"{atom.path}.*", keys=ANY)
    if form := _TENSORS.get(name) or _MODULES.get(name):
        each: Value = (tensor if name in _TENSORS else module,)
        return (Many((Tuple(((), each)),) if form == "pairs" else each),)
    if name in _BY_NAME and call.node.args:
        held = Owned(atom.path, _BY_NAME[name], keys=ANY)
        return call.flow.look_up(call.frame, (held,), call.node.args[0], call.first)
    if name == "state_dict":
        return (Table((tensor,)),)
    if name == "load_state_dict":
        call.note("load_state_dict", (tensor,))
    elif name == "register_parameter" and len(call.positional) == 2 and call.positional[1]:
        label = "|".join(texts(call.first)) or shown(call.node.args[0])
        call.note("rebind", (Owned(f"{atom.path}.{label}", Kind.PARAMETER),))
    elif name == "apply":
        for passed in call.first:
            if isinstance(passed, Code):
                call.flow.invoke(passed, [(atom,)], {})
    elif name in _SAME and atom.classes:
        return (atom,)
    return ()


def _of_container(atom: Many | Table, name: str) -> Value:
    match name:
        case "items":
            return (Many((Tuple(((), atom.item)),)),)
        case "values":
            return (Many(atom.item),)
        case "pop" | "popleft" | "popitem" | "__getitem__":
            return atom.item
        case "copy" | "union":
            return (atom,)
    return ()


def _values(value: Value) -> Value:
    """What `update(value)` adds: the values of a dictionary, the second of each pair, or what a set holds."""
    found: list[Value] = []
    for atom in value:
        match atom:
            case Table(item):
                found.append(item)
            case Many(item):
                found.extend(each.items[-1] if isinstance(each, Tuple) and each.items else (each,) for each in item)
    return join(*found)


def _outside(call: _Call, name: str) -> Value:
    """A function that is not of the tree, by its dotted name."""
    last = name.rsplit(".", 1)[-1]
    if last.endswith("Parameter"):
        return (Made(True),)
    if _writes(last):
        call.note("in-place", call.first)
        return call.first
    if name.startswith("torch."):
        if last in _HOLDERS:
            return call.first
        if last in _VIEW | _VIEWS:
            return (Many(call.first),) if last in _VIEWS else call.first
        return (Made(),)
    if last == "partial":
        named = tuple(call.named.items())
        return tuple(
            Code(atom.function, (*atom.bound, *call.positional[1:]), (*atom.named, *named), atom.scope)
            for atom in call.first
            if isinstance(atom, Code)
        )
    if last == "cast" and len(call.positional) == 2:
        cls = call.flow.sources.class_of(call.frame.source, call.node.args[0])
        return classed(call.positional[1], (cls,)) if cls else call.positional[1]
    return _builtin(call, last)


def _builtin(call: _Call, name: str) -> Value:
    first = call.first
    match name:
        case "getattr" if len(call.positional) >= 2:
            return _getattr(call)
        case "setattr" if len(call.positional) == 3:
            _setattr(call)
        case "dict" | "OrderedDict":
            return (Table(join(_values(first), *call.named.values())),)
        case "defaultdict":
            return (Table(()),)
        case "enumerate":
            return (Many((Tuple(((), items(first))),)),)
        case "zip" | "zip_longest" | "product":
            return (Many((Tuple(tuple(items(each) for each in call.positional)),)),)
        case "map" | "filter" if len(call.positional) >= 2:
            passed = [items(each) for each in call.positional[1:]]
            given = [call.flow.invoke(each, passed, {}) for each in first if isinstance(each, Code)]
            return (Many(join(*given) if name == "map" else passed[0]),)
        case "next":
            return join(items(first), *call.positional[1:])
        case "from_iterable":
            return (Many(items(items(first))),)
        case "groupby":
            return (Many((Tuple(((), (Many(items(first)),))),)),)
        case _ if name in _COLLECT:
            return (Many(join(*(items(each) for each in call.positional))),)
    return ()


def _getattr(call: _Call) -> Value:
    """An attribute by the strings that its name can be, else by the expression that names it."""
    names = texts(call.positional[1])
    if names == ["weight_loader"]:
        return ()
    found = call.positional[2:]
    for atom in call.first:
        match atom:
            case Owned():
                if names:
                    found.extend(call.flow.attribute(atom, name) for name in names)
                elif atom.kind is Kind.UNKNOWN:
                    any_of_it = (Owned(atom.path, keys=ANY),)
                    found.append(call.flow.look_up(call.frame, any_of_it, call.node.args[1], ()))
            case Sent():
                found.append((atom,))
    return join(*found)


def _setattr(call: _Call) -> None:
    node = call.node.args[1]
    for name in texts(call.positional[1]) or [call.frame.named(Owned(""), node, []).path]:
        call.flow.rebind(call.frame, call.node, call.first, name, call.positional[2])
