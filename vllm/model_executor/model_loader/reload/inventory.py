# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Every tensor that a model can reach, and where each lies in memory.

Parameters and buffers are the smaller part of what a kernel reads. Post-load steps keep
tensors as plain attributes, in lists, on kernel and backend objects, in closures and
partials. A walk goes from the model to whatever its objects hold, in the same order
every time (but for a set, which has no order of its own). It does not enter class
attributes, globals of modules, the caches of `functools` and iterators; nor objects of
vLLM's configuration and distributed packages, or of other libraries.
"""

import functools
import re
import sys
import types
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

Kind = Literal["parameter", "buffer", "attribute", "opaque"]

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


@dataclass(frozen=True)
class Storage:
    """Where a tensor lies and how: what a captured graph holds of it."""

    address: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class Entry:
    """One tensor of the model.

    `path` is how it is reached from the model, `owner` the class of what holds it. An
    `attribute` is any tensor that is neither a parameter nor a buffer of a module. An
    `opaque` one has memory that PyTorch does not show: its storage is None.
    """

    path: str
    owner: str
    kind: Kind
    tensor: torch.Tensor

    @property
    def storage(self) -> Storage | None:
        if self.kind == "opaque":
            return None
        tensor = self.tensor
        return Storage(
            tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype
        )


def inventory(model: torch.nn.Module) -> dict[str, Entry]:
    """Every tensor that `model` reaches, by path: each once, parameters and buffers
    first.
    """
    found: dict[str, Entry] = {}
    for entry in _Walk().all_of(model, ""):
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
        if entry.kind == "opaque":
            continue
        if entry.kind == "buffer" or "kv_cache" in re.split(r"\W+", entry.path):
            kept.add(entry.tensor.untyped_storage()._cdata)
        elif entry.tensor.dtype.is_floating_point:
            weights.append(entry.tensor.detach())
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


class _Walk:
    """Visits each object once, and holds it: no other can take its identity."""

    def __init__(self) -> None:
        self._seen: dict[int, Any] = {}

    def all_of(self, model: torch.nn.Module, prefix: str) -> Iterator[Entry]:
        modules = [
            (path, module)
            for path, module in model.named_modules(prefix=prefix)
            if self._first(module)
        ]
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
        if isinstance(value, _PLAIN) or not self._first(value):
            return
        if isinstance(value, torch.Tensor):
            yield _entry(path, owner, "attribute", value)
        yield from self._values(
            _inside(value),
            path,
            owner if _is_container(value) else type(value).__name__,
        )

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
    return Entry(
        path, owner, kind if tensor.layout is torch.strided else "opaque", tensor
    )


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
