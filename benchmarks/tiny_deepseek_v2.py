"""Tiny seeded DeepSeek-V2 checkpoints: multi-head latent attention in sizes that the CPU and CUDA kernels take."""

import json
from pathlib import Path

from benchmarks.tiny_gpt_oss import VOCABULARY, fill

BLOCK = 128


def write(folder: Path, seed: int, std: float) -> None:
    """Save a bf16 model of two dense layers to `folder`, its elements drawn from `seed` as those of tiny GPT-OSS are.

    The CPU decode kernel takes a latent of 512 and a rotary part of 64 elements only, FlashAttention's prefill on a GPU
    heads of 64 + 64 and values of 128 at least; all else is small. `kv_b_proj` is in block-wise fp8: what MLA derives
    from it is then made anew at each load. In bf16 it would be a view of the weight itself, which an update reaches
    whatever is bound.
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
        qk_nope_head_dim=64,
        qk_rope_head_dim=64,
        v_head_dim=128,
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
    """Turn the linears called `part` into block-wise fp8, as DeepSeek publishes its models, and leave all others.

    Each block of `BLOCK` x `BLOCK` elements has one fp32 scale.
    """
    import torch
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    tensors = load_file(path)
    linears = {name.removesuffix(".weight") for name in tensors if "_proj" in name or "lm_head" in name}
    quantized = {name for name in linears if name.endswith(part)}
    for name in quantized:
        weight = tensors[f"{name}.weight"].float()
        rows, columns = weight.shape
        blocks = weight.view(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
        scale = blocks.abs().amax(dim=(1, 3), keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
        tensors[f"{name}.weight"] = (blocks / scale).to(torch.float8_e4m3fn).view(rows, columns)
        tensors[f"{name}.weight_scale_inv"] = scale[:, 0, :, 0].contiguous()
    save_file(tensors, path, metadata={"format": "pt"})

    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "ignored_layers": sorted(linears - quantized),
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
