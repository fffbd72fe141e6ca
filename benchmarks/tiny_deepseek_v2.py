"""Tiny seeded DeepSeek-V2 checkpoints: multi-head latent attention in the sizes that the CPU kernel is built for."""

from pathlib import Path

from benchmarks.tiny_gpt_oss import VOCABULARY, fill


def write(folder: Path, seed: int, std: float) -> None:
    """Save a bf16 model of two dense layers to `folder`, its elements drawn from `seed` as those of tiny GPT-OSS are.

    The CPU decode kernel takes a latent of 512 and a rotary part of 64 elements only; all else is small.
    """
    import torch
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    config = DeepseekV2Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        first_k_dense_replace=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_nope_head_dim=32,
        qk_rope_head_dim=64,
        v_head_dim=32,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model = DeepseekV2ForCausalLM(config).to(torch.bfloat16)
    fill(model, seed, std)
    model.save_pretrained(folder)
