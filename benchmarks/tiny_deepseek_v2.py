"""Tiny seeded DeepSeek-V2 checkpoints: multi-head latent attention in the sizes that the CPU kernel is built for."""

import json
from pathlib import Path

from benchmarks.tiny_gpt_oss import VOCABULARY, fill


def write(folder: Path, seed: int, std: float) -> None:
    """Save a bf16 model of two dense layers to `folder`, its elements drawn from `seed` as those of tiny GPT-OSS are.

    The CPU decode kernel takes a latent of 512 and a rotary part of 64 elements only; all else is small. `kv_b_proj` is
    in int8 with one scale a row: what MLA derives from it is then made anew at each load, where in bf16 it would be a
    view of the weight itself, which stays in place whatever is bound.
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
    _quantize(folder, "kv_b_proj")


def _quantize(folder: Path, part: str) -> None:
    """Turn the linears called `part` into int8 with fp32 scales, in the format of compressed-tensors."""
    import torch
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name in [name for name in tensors if name.endswith(f"{part}.weight")]:
        weight = tensors[name].float()
        scale = weight.abs().amax(dim=1, keepdim=True) / 127
        tensors[name] = (weight / scale).round().to(torch.int8)
        tensors[f"{name}_scale"] = scale
    save_file(tensors, path, metadata={"format": "pt"})
    numbers = {"num_bits": 8, "type": "int", "symmetric": True}
    group = {
        "targets": [f"re:.*{part}"],
        "weights": numbers | {"strategy": "channel", "dynamic": False},
        "input_activations": numbers | {"strategy": "token", "dynamic": True},
    }
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
