# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A checkpoint at tiny dimensions: its configuration, and seeded tensors by name."""

import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

#: What makes the values of a tensor from its shape and a seeded generator, in float32.
Fill = Callable[[tuple[int, ...], torch.Generator], torch.Tensor]


class NoRecipe(LookupError):
    """There is no tiny checkpoint of an architecture; the text says why."""


@dataclass(frozen=True)
class Spec:
    """One tensor of a checkpoint. `fill` is for values that its name does not tell."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.bfloat16
    fill: Fill | None = None


@dataclass(frozen=True)
class Recipe:
    """What a checkpoint of an architecture holds: config.json, and tensors by name.

    `files` are others that the model reads, with their text. `backend` is the path of
    the attention backend that the model is built with where it cannot be run.
    """

    config: Mapping[str, Any]
    tensors: Mapping[str, Spec]
    files: Mapping[str, str] = field(default_factory=dict)
    backend: str = ""

    def write(self, folder: Path, seed: int) -> None:
        """Make `folder` a checkpoint whose every value comes from `seed` and the name
        of its tensor.
        """
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(dict(self.config)))
        for name, text in self.files.items():
            (folder / name).write_text(text)
        save_file(
            {name: values(name, spec, seed) for name, spec in self.tensors.items()},
            folder / "model.safetensors",
            metadata={"format": "pt"},
        )


def values(name: str, spec: Spec, seed: int) -> torch.Tensor:
    """The values of the tensor `name` in the checkpoint `seed`, of `spec`'s shape and
    dtype.

    A product with a weight keeps the scale of its input, so that every tensor of the
    model has a say in the logits, and rounding has none.
    """
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) ^ seed)
    fill = spec.fill or _fill_of(name, len(spec.shape))
    return fill(spec.shape, generator).to(spec.dtype)


def normal(mean: float, deviation: float) -> Fill:
    """Normally distributed values."""
    return lambda shape, generator: (
        torch.randn(shape, generator=generator) * deviation + mean
    )


def uniform(low: float, high: float) -> Fill:
    """Values between two bounds."""
    return lambda shape, generator: (
        torch.rand(shape, generator=generator) * (high - low) + low
    )


def _weight(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=generator) * 1.4 / shape[-1] ** 0.5


def _decay(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """The logarithm of a state's decay, as Mamba has it."""
    return uniform(1, 8)(shape, generator).log()


def _fill_of(name: str, dimensions: int) -> Fill:
    last = name.rpartition(".")[2].lower()
    if last == "a_log":
        return _decay
    if last in ("e_score_correction_bias", "expert_bias"):
        return normal(0, 0.05)  # no more than the scores, so that each expert has a say
    if "scale" in last and dimensions <= 2:
        return uniform(0.5, 1.5)
    if dimensions > 1:
        return _weight
    if last in ("weight", "d", "gamma") or "norm" in last:
        return normal(1, 0.3)
    return normal(0, 0.3)
