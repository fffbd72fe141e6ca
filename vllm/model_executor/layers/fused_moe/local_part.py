# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Loading of expert tensors that the model has cut to this rank's part already."""

import torch


def load_local_part(
    param: torch.Tensor,
    part: torch.Tensor,
    name: str,
    expert: int | None,
    quantized: bool,
) -> None:
    """Write `part` over one expert of this rank's stack, or over the whole stack.

    `expert` is the number of the one; None is the whole stack.

    `part` has the shape of its place. A scale of one value fills its place. A packed
    (uint8) tensor or a bias of `quantized` experts may be smaller in any dimension of
    an expert, where the kernel pads: the padding becomes 0. `param` may be on the meta
    device. Raises ValueError for any other shape, before anything is written.
    """
    place = param.data if expert is None else param.data[expert]
    if "scale" in name and part.numel() == 1:
        part = part.reshape(()).expand_as(place)
    if part.shape != place.shape:
        padded = quantized and (param.dtype == torch.uint8 or "bias" in name)
        fits = part.ndim == place.ndim and all(
            have <= room for have, room in zip(part.shape, place.shape, strict=True)
        )
        if not (padded and fits and (expert is not None or len(part) == len(place))):
            raise ValueError(
                f"{name}: this rank's part has shape {tuple(part.shape)} but its place "
                f"{tuple(place.shape)}, which it must {'fit' if padded else 'fill'}; "
                "check the checkpoint against the model's config"
            )
        place.zero_()
        place = place[tuple(slice(size) for size in part.shape)]
    place.copy_(part)
