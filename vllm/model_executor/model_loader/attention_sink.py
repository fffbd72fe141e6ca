# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Attention sinks, one learned number a head: a factory and a weight loader."""

import torch
from torch import nn

from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
)
from vllm.model_executor.utils import set_weight_attrs

NO_SINK = float("-inf")


def new_sink(
    heads: int,
    *,
    padded_heads: int | None = None,
    dtype: torch.dtype | None = None,
    name: str = "attention sink",
) -> nn.Parameter:
    """A sink parameter for this rank's `heads`, at -inf, with `load_sink` attached.

    Shape (padded_heads,), or (heads,) where the kernel wants no padding; `dtype` is
    torch's default dtype unless given; `name` is what errors call it.
    """
    sink = nn.Parameter(
        torch.full((padded_heads or heads,), NO_SINK, dtype=dtype), requires_grad=False
    )
    # A layerwise reload is complete when this many elements came in; no padding does.
    set_weight_attrs(
        sink,
        {"weight_loader": load_sink, "weight_loader_numel": heads, "sink_name": name},
    )
    return sink


def load_sink(param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
    """Write this rank's heads of a checkpoint's sink into `param`, in place.

    Padded heads become -inf.

    `loaded_weight` has shape (heads of all ranks,), in any dtype whose values survive
    the cast to that of `param`. `param` may be on the meta device. Raises ValueError,
    before anything is written: another number of dimensions, heads that do not divide
    among the ranks or are not those the model was built for, a value that would change.
    """
    heads = _heads_per_rank(param, loaded_weight)
    start = get_tensor_model_parallel_rank() * heads
    param.data[:heads].copy_(_cast(param, loaded_weight)[start : start + heads])
    param.data[heads:].fill_(NO_SINK)


def _heads_per_rank(param: torch.Tensor, loaded_weight: torch.Tensor) -> int:
    name, size = _name(param), get_tensor_model_parallel_world_size()
    if loaded_weight.ndim != 1:
        raise ValueError(
            f"{name}: a sink has one dimension, heads, but shape "
            f"{tuple(loaded_weight.shape)} has {loaded_weight.ndim}; "
            "send the checkpoint's own tensor"
        )
    heads, rest = divmod(loaded_weight.numel(), size)
    if rest:
        raise ValueError(
            f"{name}: {loaded_weight.numel()} heads do not divide among {size} "
            "tensor-parallel ranks; send the whole sink, or choose a size that "
            "divides it"
        )
    built_for = getattr(param, "weight_loader_numel", heads)
    if heads != built_for or heads > param.numel():
        raise ValueError(
            f"{name}: {loaded_weight.numel()} heads among {size} tensor-parallel ranks "
            f"make {heads} a rank, but the model was built for "
            f"{min(built_for, param.numel())}; send the whole sink of this model"
        )
    return heads


def _cast(param: torch.Tensor, loaded_weight: torch.Tensor) -> torch.Tensor:
    """`loaded_weight` in the dtype of `param`. All ranks refuse alike."""
    cast = loaded_weight.to(param.dtype)
    if cast.dtype != loaded_weight.dtype and not loaded_weight.is_meta:
        kept = torch.isclose(
            cast.to(loaded_weight.dtype), loaded_weight, rtol=0, atol=0, equal_nan=True
        )
        if not kept.all():
            raise ValueError(
                f"{_name(param)}: {int((~kept).sum())} of {kept.numel()} heads change "
                f"when cast from {loaded_weight.dtype} to {param.dtype}; "
                f"send values that {param.dtype} holds exactly"
            )
    return cast


def _name(param: torch.Tensor) -> str:
    return getattr(param, "sink_name", "attention sink")
