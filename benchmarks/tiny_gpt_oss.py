"""Tiny seeded GPT-OSS checkpoints: the real architecture and format, two megabytes, nothing downloaded."""

import random
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import GptOssForCausalLM, PreTrainedModel

VOCABULARY = 128
#: Longer than the sliding window below, so that both kinds of attention layer do what they do on long prompts.
PROMPT_TOKENS = 40


def model(seed: int, std: float) -> "GptOssForCausalLM":
    """A bf16 model on the CPU, filled from `seed`: one sliding-window and one full-attention layer of eight experts.

    The sizes are such that the CPU and CUDA kernels take them.
    """
    import torch  # here, as both take seconds to import and a usage error should not wait for them
    from transformers import GptOssConfig, GptOssForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    config = GptOssConfig(
        num_hidden_layers=2,
        num_local_experts=8,
        num_experts_per_tok=2,
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=128,
        head_dim=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=16,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    made = GptOssForCausalLM(config).to(torch.bfloat16)
    fill(made, seed, std)
    return made.eval()


def fill(model: "PreTrainedModel", seed: int, std: float) -> None:
    """Draw every element of `model` from `seed`.

    Matrices and biases are normal with deviation `std`, norm scales the same around 1. Sinks have deviation 1: they
    stand beside attention scores in a softmax, where smaller ones would not show.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            deviation = 1.0 if name.endswith("sinks") else std
            mean = 1.0 if name.endswith("norm.weight") else 0.0
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * deviation + mean)


def write(folder: Path, seed: int, std: float) -> None:
    """Save `model(seed, std)` to `folder` as a checkpoint that vLLM and transformers load."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    model(seed, std).save_pretrained(folder)


def prompts(count: int = 6, seed: int = 0) -> list[list[int]]:
    """`count` seeded prompts of `PROMPT_TOKENS` token ids each."""
    draw = random.Random(seed)
    return [[draw.randrange(VOCABULARY) for _ in range(PROMPT_TOKENS)] for _ in range(count)]
