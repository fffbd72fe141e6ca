# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A forward step recorded as operators and replayed on the storages that it had.

No model code runs in a replay.

A captured CUDA graph holds the address of every tensor that it reads. So does a
recorded graph: a tensor that is written in place is seen by a replay, one that is bound
anew is not. It needs no GPU, so what an update does to a captured graph can be shown
and tested on a CPU.

Operators that are written in Python, as vLLM's attention is, are looked into: what is
recorded is what they call. What the host reads of a tensor (`item`, `bool`, `tolist`,
`numpy`) becomes a guard, since the step may have taken a branch on it: a replay for
which it reads other bits is refused. Not seen is what is no operator (a read through a
raw pointer, a Triton kernel that is launched directly) and what another thread runs. It
is for a CPU; a GPU has graphs of its own.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from typing import Any

import numpy
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from vllm.forward_context import get_forward_context
from vllm.model_executor.layers import utils

#: Operators that take the address of a native object inside an integer tensor, with no
#: hold on the object: an update that makes another one frees it.
_NATIVE_HANDLES = frozenset({"_C::onednn_mm", "_C::onednn_scaled_mm"})

#: They reserve memory and write nothing to it.
_NO_KERNEL = frozenset(
    {
        "aten::empty.memory_format",
        "aten::empty_strided",
        "aten::empty_like",
        "aten::new_empty",
    }
)

#: They may give a tensor other memory, which a graph cannot.
_RESIZES = frozenset({"aten::resize_", "aten::resize_as_"})

#: What `tolist` and `numpy` call on the tensor whose memory they hand to the host.
_TO_HOST = torch.ops.aten.resolve_neg.default


class GraphError(RuntimeError):
    """A step cannot be recorded, or a recorded one cannot be replayed."""


@dataclass(frozen=True)
class _Call:
    """One operator with its arguments, and the tensors in storages of their own that it
    gave.
    """

    operator: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[tuple[int, torch.Tensor], ...]

    def replay(self) -> None:
        """Run the operator; what it makes goes to where the recorded step had it."""
        made = tree_flatten(self.operator(*self.args, **self.kwargs))[0]
        for position, held in self.results:
            if made[position].shape != held.shape:
                raise GraphError(
                    f"{self.operator} gave shape {tuple(held.shape)} when recorded "
                    f"and {tuple(made[position].shape)} now: its output shape depends "
                    "on data"
                )
            held.untyped_storage().copy_(made[position].untyped_storage())


@dataclass(frozen=True)
class _Guard:
    """What the host read of a tensor; the rest of the graph is right for no other
    value.
    """

    operator: torch._ops.OpOverload
    args: tuple[Any, ...]
    read: Any

    def replay(self) -> None:
        now = self.operator(*self.args)
        if isinstance(now, torch.Tensor):
            if not torch.equal(_bytes(now), _bytes(self.read)):
                raise GraphError(
                    f"{self.operator}: the host reads other values than when the step "
                    "was recorded"
                )
        # By their text NaN equals NaN, and -0.0 is not 0.0.
        elif repr(now) != repr(self.read):
            raise GraphError(
                f"{self.operator}: the host read {self.read} when recorded and "
                f"{now} now"
            )


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


@dataclass(frozen=True)
class RecordedGraph:
    """The operators of one step, on the storages that they used.

    `outputs` is what the step returned, with its tensors at fixed addresses that each
    replay writes. `reads` are the tensors, one for each storage, that the step read or
    wrote and did not make: weights, buffers, caches, inputs.
    """

    calls: tuple[_Call | _Guard, ...]
    outputs: Any
    reads: tuple[torch.Tensor, ...]

    def replay(self) -> Any:
        """Run every operator again and return `outputs`.

        Raises GraphError where the host read another value, or an operator gave another
        shape, than when recorded; what came before in the step has been written then.
        """
        with torch.inference_mode():
            for call in self.calls:
                call.replay()
        return self.outputs


def record(step: Callable[[], Any]) -> RecordedGraph:
    """Run `step` and record it. Fresh inputs for a replay are copied into the tensors
    that it read them from.

    Raises GraphError, naming the operator, for one with an output shape that depends on
    data, one with random values, one that reads a native object by its address, one
    that may move a tensor (`resize_`), and a tensor that is more than a view of plain
    memory (sparse, oneDNN's opaque layout, quantized, conjugated). Also for a step that
    returns something other than tensors and plain values in dicts, lists and tuples.
    """
    recorder = _Recorder()
    with torch.inference_mode():
        with recorder:
            outputs = step()
        for leaf in tree_flatten(outputs)[0]:
            if not isinstance(leaf, torch.Tensor | int | float | str | None):
                raise GraphError(
                    f"a step that returns a {type(leaf).__name__} cannot be recorded"
                )
        held = tree_map_only(torch.Tensor, _hold, outputs)
    return RecordedGraph(tuple(recorder.calls), held, tuple(recorder.reads.values()))


def _hold(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor over the same memory. It keeps to that memory when `tensor` is given
    another, as with `.data = `.
    """
    if (kind := _not_plain(tensor)) is not None:
        raise GraphError(f"a step that has a {kind} tensor cannot be recorded")
    bare = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return bare.set_(
        tensor.untyped_storage(),
        tensor.storage_offset(),
        tensor.size(),
        tensor.stride(),
    )


def _not_plain(tensor: torch.Tensor) -> str | None:
    """What makes `tensor` more than a view of plain memory, if anything does."""
    if tensor.layout is not torch.strided:
        return str(tensor.layout)
    if tensor.is_quantized:
        return "quantized"
    return "conjugated" if tensor.is_conj() or tensor.is_neg() else None


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


class _Recorder(TorchDispatchMode):
    """Writes down what is dispatched while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_Call | _Guard] = []
        self.reads: dict[int, torch.Tensor] = {}
        self._made: dict[int, torch.Tensor] = {}

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if operator is torch.ops.aten.lift_fresh.default:
            # A tensor that the step made of numbers in Python: a constant, which it
            # may write to afterwards.
            constant = _hold(args[0])
            self._made[_storage(constant)] = constant
            values = (constant, constant.clone())
            self.calls.append(_Call(torch.ops.aten.copy_.default, values, {}, ()))
            return operator(*args)
        if operator is _TO_HOST:
            return self._guard(operator, args, operator(*args))
        key = _key(args, kwargs)
        if operator.namespace != "aten" and _is_python(operator, key):
            with self:
                return operator.redispatch(_keys(key), *args, **kwargs)
        if operator.namespace == "aten":
            with self:
                parts = operator.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        self._refuse(operator, args, kwargs)
        if torch.Tag.data_dependent_output in operator.tags:
            return self._guard(operator, args, operator(*args, **kwargs))
        return self._call(operator, args, kwargs)

    def _refuse(
        self,
        operator: torch._ops.OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        dynamic = torch.Tag.dynamic_output_shape in operator.tags
        if operator.overloadpacket is torch.ops.aten.index:
            dynamic = any(
                index is not None and index.dtype in (torch.bool, torch.uint8)
                for index in args[1]
            )
        if dynamic:
            raise GraphError(
                f"{operator} cannot be recorded: its output shape depends on data"
            )
        if operator.name() in _NATIVE_HANDLES:
            raise GraphError(
                f"{operator} cannot be recorded: it reads a native object that an "
                "update may free; keep the layers in the checkpoint's layout"
            )
        if operator.name() in _RESIZES:
            raise GraphError(f"{operator} cannot be recorded: it may move a tensor")
        if _is_random(operator, args, kwargs):
            raise GraphError(f"{operator} cannot be recorded: its values are random")
        self._refuse_not_plain(operator, (args, kwargs))

    def _refuse_not_plain(self, operator: torch._ops.OpOverload, tensors: Any) -> None:
        for tensor in _tensors(tensors):
            if (kind := _not_plain(tensor)) is not None:
                raise GraphError(
                    f"{operator} cannot be recorded: it has a {kind} tensor"
                )

    def _guard(
        self, operator: torch._ops.OpOverload, args: tuple[Any, ...], read: Any
    ) -> Any:
        kept = read.clone() if isinstance(read, torch.Tensor) else read
        self.calls.append(_Guard(operator, self._held(args), kept))
        return read

    def _call(
        self,
        operator: torch._ops.OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        held_args, held_kwargs = self._held(args), self._held(kwargs)
        made = operator(*args, **kwargs)
        self._refuse_not_plain(operator, made)
        given = {_storage(tensor) for tensor in _tensors((args, kwargs))}
        results = [
            (position, _hold(result))
            for position, result in enumerate(tree_flatten(made)[0])
            if isinstance(result, torch.Tensor) and _storage(result) not in given
        ]
        # The maker of a storage is held with it, so that no later one can have the same
        # identity.
        self._made.update((_storage(result), result) for _, result in results)
        # What is no view is run again even if it gives nothing: an assertion, and an
        # operator outside PyTorch that writes to what its schema does not mark.
        only_a_view = operator.is_view and not results
        if not only_a_view and operator.name() not in _NO_KERNEL:
            self.calls.append(_Call(operator, held_args, held_kwargs, tuple(results)))
        return made

    def _held(self, arguments: Any) -> Any:
        for tensor in _tensors(arguments):
            if _storage(tensor) not in self._made:
                self.reads.setdefault(_storage(tensor), _hold(tensor))
        return tree_map_only(torch.Tensor, _hold, arguments)


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, torch.Tensor))


def _key(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """The name of the dispatch key of the kernels for the first tensor's device."""
    device = next((tensor.device.type for tensor in _tensors((args, kwargs))), "cpu")
    return torch._C._dispatch_key_for_device(device)


def _keys(key: str) -> torch._C.DispatchKeySet:
    """That key alone, and no key of a mode."""
    return torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))


def _is_python(operator: torch._ops.OpOverload, key: str) -> bool:
    """Whether the kernel that `operator` has for `key` is written in Python."""
    name = operator.name().replace("::", "/", 1)
    keys = (key, "CompositeExplicitAutograd", "CompositeImplicitAutograd")
    return any(f"{name}/{key}" in torch.library._impls for key in keys)


def _is_random(
    operator: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    """Whether the values that `operator` gives are random. Attention is if it drops."""
    if torch.Tag.nondeterministic_seeded not in operator.tags:
        return False
    for position, argument in enumerate(operator._schema.arguments):
        if argument.name == "dropout_p":
            given = args[position] if position < len(args) else 0.0
            return kwargs.get("dropout_p", given) != 0.0
    return True


@contextmanager
def checkpoint_layout() -> Iterator[None]:
    """Unquantized linears made meanwhile keep their weight as the checkpoint has it,
    also on a CPU, as on a GPU.

    A CPU packs them behind native handles else, which no graph may hold.
    """
    packing = utils.dispatch_cpu_unquantized_gemm
    utils.dispatch_cpu_unquantized_gemm = _unpacked
    try:
        yield
    finally:
        utils.dispatch_cpu_unquantized_gemm = packing


def _unpacked(layer: torch.nn.Module, *_: object, **__: object) -> None:
    layer.cpu_linear = torch.nn.functional.linear


class GraphedForward:
    """A model's forward that records each step of one token and replays it, as an
    engine does with CUDA graphs.

    It stands where `forward` stood. The inputs of a step are its tensor arguments and
    those of the attention metadata in the forward context of the running step;
    everything else about them (counts, longest lengths, shapes) is the key under which
    a graph is kept. Other steps, and all with `replaying` off, run `forward` itself.
    """

    def __init__(self, forward: Callable[..., Any]):
        self.replaying = True
        self.graphs: dict[
            tuple[Any, ...], tuple[list[torch.Tensor], RecordedGraph]
        ] = {}
        self._forward = forward

    def __call__(self, **kwargs: Any) -> Any:
        if not self.replaying or len(kwargs["input_ids"]) != 1:
            return self._forward(**kwargs)
        context = get_forward_context()
        inputs: list[torch.Tensor] = []
        key = tuple(
            _describe((kwargs, context.attn_metadata, context.slot_mapping), inputs)
        )
        if key not in self.graphs:
            graph = record(lambda: self._forward(**kwargs))
            self.graphs[key] = ([_hold(tensor) for tensor in inputs], graph)
            return tree_map_only(torch.Tensor, torch.clone, graph.outputs)
        buffers, graph = self.graphs[key]
        for buffer, fresh in zip(buffers, inputs, strict=True):
            buffer.copy_(fresh)
        return tree_map_only(torch.Tensor, torch.clone, graph.replay())


def _describe(value: Any, tensors: list[torch.Tensor]) -> Iterator[Any]:
    """What a step depends on besides the contents of its input tensors, which go to
    `tensors` in order.
    """
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        yield (tuple(value.shape), value.dtype)
    elif isinstance(value, int | float | str | None | Enum | numpy.generic):
        yield value
    elif isinstance(value, Mapping):
        for name, entry in value.items():
            yield name
            yield from _describe(entry, tensors)
    elif isinstance(value, list | tuple):
        yield len(value)
        for entry in value:
            yield from _describe(entry, tensors)
    elif is_dataclass(value):
        for field in fields(value):
            yield from _describe(getattr(value, field.name), tensors)
    else:
        raise GraphError(
            f"a step with an input of type {type(value).__name__} cannot be recorded"
        )
