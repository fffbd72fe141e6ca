# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Writing a part that the model has cut for this rank over an expert, or over the whole
stack.
"""

import pytest
import torch

from vllm.model_executor.layers.fused_moe.local_part import load_local_part
from vllm.model_executor.model_loader.reload.meta import CopyCounter

STACK = torch.arange(24).view(2, 3, 4)


def old(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape, 99).to(dtype)


def test_the_whole_stack() -> None:
    param = old(2, 3, 4)
    load_local_part(param, STACK.float(), "w13_weight", None, quantized=False)
    assert torch.equal(param, STACK.float())


def test_one_expert_leaves_the_others() -> None:
    param = old(2, 3, 4)
    load_local_part(param, STACK[1].float(), "w13_weight", 1, quantized=False)
    assert torch.equal(param[1], STACK[1].float()) and (param[0] == 99).all()


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("place", [(2,), (2, 1), (2, 3)])
def test_a_scale_of_one_value_fills_its_place(
    shape: tuple[int, ...], place: tuple[int, ...]
) -> None:
    param = old(*place)
    load_local_part(
        param, torch.full(shape, 0.5), "w13_weight_scale", 1, quantized=True
    )
    assert (param[1] == 0.5).all() and (param[0] == 99).all()
    load_local_part(
        param, torch.full(shape, 0.25), "w13_input_scale", None, quantized=True
    )
    assert (param == 0.25).all()


@pytest.mark.parametrize(
    "name,dtype,part",
    [
        ("w13_weight", torch.uint8, STACK[:, :2, :3]),
        ("w13_bias", torch.float32, STACK[:, 0, :3]),
    ],
)
def test_padding_of_quantized_experts_becomes_zero(
    name: str, dtype: torch.dtype, part: torch.Tensor
) -> None:
    whole = (2, 3, 4) if name == "w13_weight" else (2, 4)
    padded = torch.zeros(whole, dtype=dtype)
    padded[tuple(slice(size) for size in part.shape)] = part.to(dtype)

    param = old(*whole, dtype=dtype)
    load_local_part(param, part.to(dtype), name, None, quantized=True)
    assert torch.equal(param, padded)

    param = old(*whole, dtype=dtype)
    load_local_part(param, part[1].to(dtype), name, 1, quantized=True)
    assert torch.equal(param[1], padded[1]) and (param[0] == 99).all()


@pytest.mark.parametrize(
    "name,dtype,shape,expert,quantized,verb",
    [
        ("w13_weight", torch.bfloat16, (2, 3, 3), None, False, "fill"),
        ("w13_weight", torch.bfloat16, (2, 3, 3), None, True, "fill"),
        ("w13_weight", torch.bfloat16, (2, 3, 5), None, False, "fill"),
        ("w13_weight", torch.bfloat16, (1, 3, 4), None, False, "fill"),
        ("w13_weight", torch.bfloat16, (3, 4), None, False, "fill"),
        ("w13_weight", torch.bfloat16, (1,), 0, False, "fill"),
        ("w13_weight", torch.bfloat16, (2, 4), 0, False, "fill"),
        ("w13_weight", torch.uint8, (2, 3, 5), None, True, "fit"),
        ("w13_weight", torch.uint8, (1, 3, 4), None, True, "fit"),
        ("w13_weight", torch.uint8, (3, 4), None, True, "fit"),
        ("w13_weight", torch.uint8, (4, 4), 0, True, "fit"),
        ("w13_weight", torch.uint8, (2, 3, 3), None, False, "fill"),
    ],
)
def test_another_shape_is_refused_and_nothing_written(
    name, dtype, shape, expert, quantized, verb
) -> None:
    param = old(2, 3, 4, dtype=dtype)
    with pytest.raises(
        ValueError, match=rf"layer\.{name}: .*which it must {verb};"
    ) as error:
        load_local_part(
            param, torch.ones(shape, dtype=dtype), f"layer.{name}", expert, quantized
        )
    assert "\n" not in str(error.value)
    assert (param == 99).all()


@pytest.mark.parametrize(
    "name,shape", [("w13_weight", (2, 2, 3)), ("w13_weight_scale", ())]
)
def test_a_meta_parameter_counts_what_it_would_take(
    name: str, shape: tuple[int, ...]
) -> None:
    """A layerwise reload runs the loader on meta to count: what came in, a filled scale
    whole, padding never.
    """
    param = torch.empty(2, 3, 4, dtype=torch.uint8, device="meta")
    with CopyCounter() as counter:
        load_local_part(
            param, torch.ones(shape, dtype=torch.uint8), name, None, quantized=True
        )
    assert counter.copied_numel == (24 if "scale" in name else 12)
