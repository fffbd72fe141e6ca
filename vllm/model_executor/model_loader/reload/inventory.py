# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Every tensor that a model can reach, and where each lies in memory.

Parameters and buffers are the smaller part of what a kernel reads. Post-load steps keep
tensors as plain attributes, in lists, on kernel and backend objects, in closures and
partials, in caches of modules and classes under the layer as the key, and numbers that
the host has read from them. A walk goes from the model to whatever its objects hold, in
the same order every time (but for a set, which has no order of its own). What it cannot
look into and does not know as harmless it lists as opaque.
"""

import functools
import gc
import re
import sys
import types
import warnings
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Literal

import numpy
import torch

Kind = Literal["parameter", "buffer", "attribute", "number", "opaque"]

#: Objects of these packages hold settings, processes or files, and lead out of the
#: model.
_FOREIGN = sys.stdlib_module_names | {
    "numpy",
    "pydantic",
    "torch",
    "transformers",
    "triton",
}
_ELSEWHERE = (
    "vllm.config",
    "vllm.distributed",
    "vllm.logger",
    "vllm.platforms",
    "vllm.compilation",
    "vllm.envs",
)

#: What keeps how layers are loaded, and nothing that a kernel reads.
_LOADING = ("vllm.model_executor.model_loader",)

#: Objects of other libraries that can hold no weight.
_HARMLESS = (
    "_contextvars.",
    "_thread.",
    "builtins.builtin_function_or_method",
    "builtins.ellipsis",
    "builtins.method-wrapper",
    "builtins.range",
    "builtins.slice",
    "builtins.wrapper_descriptor",
    "contextlib.",
    "contextvars.",
    "datetime.",
    "enum.",
    "logging.",
    "numpy.dtype",
    "operator.",
    "pathlib.",
    "re.Pattern",
    "threading.",
    "torch._C._distributed_c10d.",
    "torch._ops.",
    "torch.cuda.",
    "torch.distributed.",
    "torch.Event",
    "torch.Size",
    "torch.Stream",
    "transformers.configuration_utils.",
    "typing.",
    "uuid.",
)

#: Attributes that hold the address of a native object in a tensor or a number.
_HANDLES = frozenset({("CPUDNNLGEMMHandler", "handler_tensor")})


@dataclass(frozen=True)
class Storage:
    """Where a tensor lies and how: what a captured graph holds of it."""

    address: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class Entry:
    """One tensor of the model, or what may stand for one.

    `path` is how it is reached from the model, `owner` the class of what holds it. An
    `attribute` is any tensor that is neither a parameter nor a buffer of a module; an
    array of NumPy is one, over its memory. A `number` is a Python float: the host may
    have read it from a tensor. An `opaque` one has memory that cannot be seen here: a
    native handle, an iterator, an object of another library, a tensor in a layout of
    its own. `value` is a tensor for the first three, and storage is None for the
    others.
    """

    path: str
    owner: str
    kind: Kind
    value: Any

    @property
    def storage(self) -> Storage | None:
        if self.kind in ("number", "opaque"):
            return None
        tensor = self.value
        return Storage(
            tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype
        )


def inventory(model: torch.nn.Module) -> dict[str, Entry]:
    """What `model` reaches, by path: each once, parameters and buffers first.

    Tensors and numbers, and what is opaque; of the caches of modules and classes what
    they keep for an object of the model.
    """
    found: dict[str, Entry] = {}
    walk = _Walk()
    for entry in chain(walk.all_of(model, ""), walk.caches()):
        path = entry.path
        while path in found:  # a closure's variable and an attribute of one name
            path += "'"
        found[path] = replace(entry, path=path)
    return found


def poison(model: torch.nn.Module, seed: int = 0) -> None:
    """Overwrite the floating-point tensors of `model` with seeded garbage, in place.

    All but buffers and KV caches, and what shares memory with one. This is what a
    level-2 sleep leaves: it keeps the buffers alone, and an update has to bring back
    the rest.
    """
    generator = torch.Generator().manual_seed(seed)
    weights, kept = [], set()
    for entry in inventory(model).values():
        if entry.storage is None:
            continue
        if entry.kind == "buffer" or is_of_requests(entry.path):
            kept.add(entry.value.untyped_storage()._cdata)
        elif entry.value.dtype.is_floating_point:
            weights.append(entry.value.detach())
    for tensor in weights:
        if tensor.untyped_storage()._cdata in kept or tensor.is_meta:
            continue
        for dimension in (n for n, stride in enumerate(tensor.stride()) if stride == 0):
            tensor = tensor.narrow(dimension, 0, min(1, tensor.shape[dimension]))
        if tensor.dtype == torch.float4_e2m1fn_x2:
            tensor = tensor.view(torch.uint8)
            tensor.copy_(torch.randint(256, tensor.shape, generator=generator))
        else:
            tensor.copy_(torch.rand(tensor.shape, generator=generator) * 2 - 1)


def is_of_requests(path: str) -> bool:
    """Whether what lies at `path` is the state of running requests: a KV cache."""
    return "kv_cache" in re.split(r"\W+", path)


class _Walk:
    """Visits each object once, and holds it: no other can take its identity."""

    def __init__(self) -> None:
        self._seen: dict[int, Any] = {}
        self._modules: dict[int, str] = {}

    def all_of(self, model: torch.nn.Module, prefix: str) -> Iterator[Entry]:
        modules = [
            (path, module)
            for path, module in model.named_modules(prefix=prefix)
            if self._first(module)
        ]
        self._modules.update((id(module), path) for path, module in modules)
        for path, module in modules:
            for kind, tensors in (
                ("parameter", module._parameters),
                ("buffer", module._buffers),
            ):
                for name, tensor in tensors.items():
                    if tensor is not None and self._first(tensor):
                        yield _entry(
                            _join(path, name), type(module).__name__, kind, tensor
                        )
        for path, module in modules:
            yield from self._rest(module, path)

    def _rest(self, module: torch.nn.Module, path: str) -> Iterator[Entry]:
        """What a module keeps besides its parameters, buffers and children, and what
        hangs on those tensors.
        """
        owner = type(module).__name__
        for name, value in vars(module).items():
            if name in ("_parameters", "_buffers"):
                for held, tensor in value.items():
                    yield from self._values(
                        _attributes(tensor), _join(path, held), owner
                    )
            elif name != "_modules":
                yield from self._value(value, _join(path, name), owner)

    def _values(
        self, values: Iterable[tuple[str, Any]], path: str, owner: str
    ) -> Iterator[Entry]:
        for words, value in values:
            yield from self._value(value, path + words, owner)

    def _value(self, value: Any, path: str, owner: str) -> Iterator[Entry]:
        if isinstance(value, torch.nn.Module):
            # One that is no child of the model: an attribute of an object, or in a
            # list.
            yield from self.all_of(value, path)
            return
        if type(value) is float:  # the same one may stand for several
            yield Entry(path, owner, "number", value)
            return
        if isinstance(value, _PLAIN) or not self._first(value):
            return
        if isinstance(value, torch.Tensor):
            yield _entry(path, owner, "attribute", value)
        elif isinstance(value, numpy.ndarray) and value.dtype.kind in "biufc":
            yield _entry(path, owner, "attribute", _over(value))
        elif _is_opaque(value):
            yield Entry(path, owner, "opaque", value)
        yield from self._values(
            _inside(value),
            path,
            owner if _is_container(value) else type(value).__name__,
        )

    def caches(self) -> Iterator[Entry]:
        """What caches of modules and classes keep for an object that was visited, and
        tensors that classes keep.
        """
        visited = list(self._seen.values())
        own = {
            id(each): self._modules.get(id(each), type(each).__name__)
            for each in visited
        }
        classes = {
            f"{cls.__module__}.{cls.__qualname__}": cls
            for each in visited
            for cls in type(each).__mro__
            if _is_of_the_model(cls)
        }
        packages = {name.split(".")[0] for name in classes}
        modules = {
            name: module
            for name, module in list(sys.modules.items())
            if name.split(".")[0] in packages
            and not name.startswith(_ELSEWHERE + _LOADING)
        }
        for home, holder in sorted((classes | modules).items()):
            for name, value in list(vars(holder).items()):
                path = f"{home}.{name}"
                if isinstance(value, torch.Tensor) and home in classes:
                    yield from self._value(value, path, home)
                for words, kept in _kept_for(own, value):
                    yield from self._value(kept, path + words, home)

    def _first(self, value: Any) -> bool:
        new = id(value) not in self._seen
        self._seen[id(value)] = value
        return new


#: They hold no tensor.
_PLAIN = (
    str,
    bytes,
    int,
    float,
    complex,
    type(None),
    type,
    types.ModuleType,
    torch.dtype,
    torch.device,
    torch.Generator,
)


_SEQUENCES = list | tuple | Set | deque

#: Their attributes are the model's, though their class is not.
_OPEN = torch.Tensor | types.SimpleNamespace

#: What `_inside` looks into, whatever their class.
_ENTERED = (
    _OPEN | functools.partial | types.MethodType | types.FunctionType | weakref.ref
)


def _is_container(value: Any) -> bool:
    return isinstance(value, Mapping | _SEQUENCES)


def _inside(value: Any) -> Iterator[tuple[str, Any]]:
    """What `value` holds, each with the words that lead to it."""
    if isinstance(value, Mapping):
        yield from (
            (f"[{key!r}]" if isinstance(key, str | int) else f"[#{n}]", value[key])
            for n, key in enumerate(value)
        )
    elif isinstance(value, _SEQUENCES):
        yield from ((f"[{position}]", inner) for position, inner in enumerate(value))
    elif isinstance(value, functools.partial):
        yield from (
            (".func", value.func),
            (".args", value.args),
            (".keywords", value.keywords),
        )
    elif isinstance(value, types.MethodType):
        yield from ((".__self__", value.__self__), (".__func__", value.__func__))
    elif isinstance(value, types.FunctionType):
        yield from _of_a_function(value)
    elif isinstance(value, weakref.ref):
        yield "()", value()
    elif isinstance(value, _OPEN) or _is_of_the_model(type(value)):
        yield from _attributes(value)


def _of_a_function(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(
        function.__code__.co_freevars, function.__closure__ or (), strict=True
    ):
        try:
            yield f".{name}", cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    yield ".__defaults__", function.__defaults__
    yield ".__kwdefaults__", function.__kwdefaults__
    yield from ((f".{name}", inner) for name, inner in vars(function).items())


def _is_of_the_model(cls: type) -> bool:
    name = cls.__module__
    return name.split(".")[0] not in _FOREIGN and not name.startswith(_ELSEWHERE)


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    yield from (
        (f".{name}", inner) for name, inner in getattr(value, "__dict__", {}).items()
    )
    for cls in type(value).__mro__:
        slots = vars(cls).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name.startswith("__") and not name.endswith("__"):
                name = f"_{cls.__name__.lstrip('_')}{name}"
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                yield f".{name}", getattr(value, name)


def _entry(path: str, owner: str, kind: Kind, tensor: torch.Tensor) -> Entry:
    handle = (owner, path.rpartition(".")[2]) in _HANDLES
    plain = tensor.layout is torch.strided and not handle
    return Entry(path, owner, kind if plain else "opaque", tensor)


def _over(array: numpy.ndarray) -> torch.Tensor:
    """A tensor over the memory of `array`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one that is not to be written to
        return torch.from_numpy(array)


def _is_opaque(value: Any) -> bool:
    """Whether `value` is an object that may hold a weight and cannot be looked into."""
    if isinstance(value, _ENTERED) or _is_container(value):
        return False
    return not any(
        f"{cls.__module__}.{cls.__qualname__}".startswith(_HARMLESS + _ELSEWHERE)
        for cls in type(value).__mro__
    ) and not _is_of_the_model(type(value))


def _kept_for(own: Mapping[int, str], cache: Any) -> Iterator[tuple[str, Any]]:
    """What `cache`, a mapping or a function of `functools`, keeps for one of `own`,
    which are names by identity.
    """
    results = []
    if isinstance(cache, functools._lru_cache_wrapper):
        results = list(_results(cache))
        keys = [key for key, _ in results]
    else:
        keys = list(cache) if isinstance(cache, Mapping) else []
    for number, key in enumerate(keys):
        for part in key if isinstance(key, tuple) else (key,):
            name = own.get(part if type(part) is int else id(part))
            if name is not None:
                # Not before it is known to be of the model: a mapping may make values.
                yield f"[{name}]", results[number][1] if results else cache[key]
                break


def _results(function: Any) -> Iterator[tuple[Any, Any]]:
    """The arguments and the result of each call that `function` remembers."""
    held = gc.get_referents(function)
    for position, each in enumerate(held):
        # One without a bound has them in a dict, the others in a list of elements, of
        # which the collector sees the key, the result and the class.
        if type(each) is dict and each is not vars(function):
            yield from (
                (key, result)
                for key, result in each.items()
                if type(result).__name__ != "_lru_list_elem"
            )
        elif isinstance(each, type) and each.__name__ == "_lru_list_elem":
            yield held[position - 2], held[position - 1]


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
