# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Tiny checkpoints, in the format of real ones, for the architectures of the
registry.
"""

import transformers

from . import dense, experts, hybrid, latent, special, towers
from .overrides import OVERRIDES
from .recipe import NoRecipe, Recipe
from .shrink import from_transformers

__all__ = ["NoRecipe", "Recipe", "tiny"]

#: What is written by hand, by architecture.
RECIPES = (
    dense.RECIPES
    | experts.RECIPES
    | latent.RECIPES
    | hybrid.RECIPES
    | special.RECIPES
    | towers.RECIPES
)


def tiny(architecture: str) -> Recipe:
    """What a tiny checkpoint of `architecture` holds. Raises NoRecipe with the reason
    where there is none.
    """
    if architecture in dense.IMPOSSIBLE:
        raise NoRecipe(dense.IMPOSSIBLE[architecture])
    if architecture in RECIPES:
        return RECIPES[architecture]()
    if hasattr(transformers, architecture):
        return from_transformers(architecture, OVERRIDES.get(architecture, {}))
    raise NoRecipe("no tiny configuration is written yet")
