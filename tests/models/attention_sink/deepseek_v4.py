# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""DeepSeek V4 and V4.1 and their drafters on every platform, each with the heads its
kernel wants and with others.

They are built on a CPU, where nothing runs their kernels. What each platform asks its
hardware at construction is answered by a stand-in, which `HARDWARE` names.
"""

import importlib
import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.models.attention_sink.harness import HEADS, TINY, Row
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability

DEEPSEEK_V4 = TINY | {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "num_key_value_heads": 1,
    "head_dim": 128,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 32,
    "o_lora_rank": 32,
    "o_groups": 2,
    "sliding_window": 16,
    "compress_ratios": [0, 0],
    "compress_rope_theta": 10000.0,
    "rope_theta": 10000.0,
    "rope_parameters": {"rope_type": "default"},
    "rms_norm_eps": 1e-6,
    "index_topk": 16,
    "index_n_heads": 4,
    "index_head_dim": 64,
    "hc_mult": 2,
    "hc_eps": 1e-6,
    "hc_sinkhorn_iters": 2,
    "num_hash_layers": 0,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "hidden_act": "silu",
    "swiglu_limit": 10.0,
    "topk_method": "noaux_tc",
    "tie_word_embeddings": False,
    "num_nextn_predict_layers": 1,
    "n_mtp_layers": 2,
    "dspark_target_layer_ids": [0, 1],
    "dspark_markov_rank": 8,
    "dspark_block_size": 2,
}
DEEPSEEK_V41 = DEEPSEEK_V4 | {
    "architectures": ["DeepseekV41ForCausalLM"],
    "model_type": "deepseek_v41",
    # None of the layers: a compressor needs a full-sized head.
    "kv_source_layer_ids": [TINY["num_hidden_layers"]],
}

Prepare = Callable[[pytest.MonkeyPatch], None]


def cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU worker's own stand-in for CUDA events and streams."""
    del monkeypatch
    import vllm.v1.worker.cpu.shm  # noqa: F401


def xpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for events of an XPU."""
    cpu(monkeypatch)
    monkeypatch.setattr(torch.xpu, "Event", torch.cuda.Event)


def nvidia(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU of Hopper's capability."""
    cpu(monkeypatch)
    hopper = classmethod(lambda cls, device_id=0: DeviceCapability(9, 0))
    monkeypatch.setattr(type(current_platform), "get_device_capability", hopper)


def amd(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that tells its name, and no kernel library: a second one would end the
    process.
    """
    cpu(monkeypatch)
    with monkeypatch.context() as at_import:
        at_import.setitem(sys.modules, "vllm._C", None)
        at_import.setattr(
            torch.cuda,
            "get_device_properties",
            lambda device: SimpleNamespace(gcnArchName="gfx950"),
        )
        import vllm.platforms.rocm  # noqa: F401


def dspark_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one model runner that knows DSpark wants Triton. No runner is started."""
    monkeypatch.setattr("vllm.config.vllm.HAS_TRITON", True)


def kernel_of(module: str, heads: int) -> Prepare:
    """A kernel that wants `heads` heads at least, for every attention layer of the
    family of `module`.
    """

    def prepare(monkeypatch: pytest.MonkeyPatch) -> None:
        importlib.import_module(module)
        family = importlib.import_module(f"{module.rsplit('.', 2)[0]}.attention")
        for attention in family.DeepseekV4Attention.__subclasses__():
            monkeypatch.setattr(
                attention,
                "get_padded_num_q_heads",
                classmethod(lambda cls, here: max(here, heads)),
            )

    return prepare


def together(*steps: Prepare) -> Prepare:
    def prepare(monkeypatch: pytest.MonkeyPatch) -> None:
        for step in steps:
            step(monkeypatch)

    return prepare


HARDWARE = {"cpu": cpu, "xpu": xpu, "amd": amd, "nvidia": nvidia}
#: How many heads the kernel of each platform wants at least.
KERNEL_HEADS = {"cpu": 0, "xpu": 0, "amd": 0, "nvidia": 64}
#: What some models fold at the end of every load: a layer's own weights, which have to
#: be there by then.
FOLDED = {
    f"layers.0.hc_{part}_{name}": shape
    for part in ("attn", "ffn")
    for name, shape in {"fn": (8, 128), "base": (8,), "scale": (3,)}.items()
}


def rows(name: str, platform: str, module: str, **other: Any) -> dict[str, Row]:
    """A model with its own kernel, and with one that pads where its own does not or
    does not where its own does.
    """
    row = Row(
        module=f"vllm.models.{other['config']['model_type']}.{platform}.{module}",
        kernel_heads=KERNEL_HEADS[platform],
        prepare=together(HARDWARE[platform], dspark_runner)
        if module == "dspark"
        else HARDWARE[platform],
        # Before 0.31 the kernels' cache has to be asked for by name.
        engine={"kv_cache_dtype": "fp8"},
        **other,
    )
    padded, heads = ("unpadded", 0) if row.kernel_heads else ("padded", HEADS + 3)
    changed = together(row.prepare, kernel_of(row.module, heads))
    return {
        f"{name}-{platform}": row,
        f"{name}-{platform}-{padded}": replace(
            row, kernel_heads=heads, prepare=changed
        ),
    }


def target(platform: str) -> dict[str, Row]:
    return rows(
        "deepseek-v4",
        platform,
        "model",
        config=DEEPSEEK_V4,
        weight="layers.{}.attn.attn_sink",
        parameter="model.layers.{}.attn.attn_sink",
        model="DeepseekV4ForCausalLM",
        also=FOLDED if platform == "nvidia" else {},
    )


def target_v41(platform: str) -> dict[str, Row]:
    return rows(
        "deepseek-v41",
        platform,
        "vl_model",
        config=DEEPSEEK_V41,
        weight="layers.{}.attn.attn_sink",
        parameter="language_model.model.layers.{}.attn.attn_sink",
        model="DeepseekV41ForCausalLM",
        also=FOLDED,
    )


def drafter(name: str, platform: str, module: str, **other: Any) -> dict[str, Row]:
    return rows(
        name,
        platform,
        module,
        weight="mtp.{}.attn.attn_sink",
        called="model.layers.2.attn.attn_sink",
        stages=(),
        unstaged="a drafter is whole on each stage",
        **other,
    )


def mtp(platform: str) -> dict[str, Row]:
    return drafter(
        "deepseek-v4-mtp",
        platform,
        "mtp",
        config=DEEPSEEK_V4,
        parameter="model.layers.2.mtp_block.attn.attn_sink",
        model="DeepSeekV4MTP",
        layers=(0,),
        draft={"method": "mtp", "num_speculative_tokens": 1},
    )


def dspark(name: str, config: dict[str, Any], platform: str) -> dict[str, Row]:
    return drafter(
        name,
        platform,
        "dspark",
        config=config,
        parameter="model.layers.{}.attn.attn_sink",
        model="DSparkDeepseekV4ForCausalLM",
        draft={"method": "dspark", "num_speculative_tokens": 2},
    )


ROWS: dict[str, Row] = {}
for platform in ("cpu", "xpu", "amd", "nvidia"):
    ROWS |= target(platform)
for platform in ("xpu", "amd", "nvidia"):
    ROWS |= mtp(platform) | dspark("deepseek-v4-dspark", DEEPSEEK_V4, platform)
for platform in ("amd", "nvidia"):
    ROWS |= target_v41(platform) | dspark("deepseek-v41-dspark", DEEPSEEK_V41, platform)
ROWS = {name: replace(row, dtype=torch.float32) for name, row in ROWS.items()}
