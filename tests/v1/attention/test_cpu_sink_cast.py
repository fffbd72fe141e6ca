# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Attention sinks that the CPU kernel cannot read as they are follow every weight
update, eager and replayed.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GptOssConfig, GptOssForCausalLM

from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.model_executor.model_loader.reload.recorded_graph import (
    GraphedForward,
    checkpoint_layout,
)
from vllm.platforms import current_platform

pytestmark = pytest.mark.skipif(
    not current_platform.is_cpu(), reason="the CPU attention backend"
)

HEADS = 4


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two fp16 checkpoints of one GPT-OSS model, which differ in the sinks alone."""
    torch.manual_seed(1)
    config = GptOssConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_local_experts=2,
        num_experts_per_tok=1,
        num_attention_heads=HEADS,
        num_key_value_heads=1,
        head_dim=32,
        eos_token_id=None,
        pad_token_id=None,
    )
    model = GptOssForCausalLM(config).half()
    for parameter in model.parameters():
        parameter.data.normal_(std=0.1)
    paths = tmp_path_factory.mktemp("A"), tmp_path_factory.mktemp("B")
    for shift, path in enumerate(paths):
        model.save_pretrained(path)
        tensors = load_file(path / "model.safetensors")
        sinks = {
            name: torch.tensor([-2.0, -0.5, 1.0, 3.0]).half() + shift
            for name in tensors
            if name.endswith("sinks")
        }
        assert len(sinks) == 2
        save_file(
            tensors | sinks, path / "model.safetensors", metadata={"format": "pt"}
        )
    return paths


@contextmanager
def engine(checkpoint: Path, dtype: str) -> Iterator[LLM]:
    llm = LLM(
        model=str(checkpoint),
        dtype=dtype,
        enforce_eager=True,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_model_len=64,
        max_num_seqs=4,
    )
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        cleanup_dist_env_and_memory()


Answer = tuple[list[int], list[dict[int, float]]]


def answer(llm: LLM) -> Answer:
    sampling = SamplingParams(
        temperature=0, max_tokens=6, logprobs=5, ignore_eos=True, detokenize=False
    )
    output = llm.generate(
        [{"prompt_token_ids": [5, 3, 8, 1, 9]}], sampling, use_tqdm=False
    )[0].outputs[0]
    return list(output.token_ids), [
        {t: p.logprob for t, p in row.items()} for row in output.logprobs
    ]


def graphed(llm: LLM) -> GraphedForward:
    """Put recorded graphs into the engine."""
    model = llm.llm_engine.model_executor.driver_worker.worker.model_runner.model
    model.forward = GraphedForward(model.forward)
    return model.forward


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_sinks_follow_updates(checkpoints: tuple[Path, Path], dtype: str) -> None:
    a, b = checkpoints
    with checkpoint_layout(), engine(b, dtype) as fresh:
        want = answer(fresh)
    with checkpoint_layout(), engine(a, dtype) as warm:
        graphs = graphed(warm)
        first = answer(warm)
        assert first != want and graphs.graphs, "the sinks must matter"
        for checkpoint, expected in ((b, want), (a, first), (b, want)):
            warm.collective_rpc(
                "reload_weights", kwargs={"weights_path": str(checkpoint)}
            )
            for graphs.replaying in (True, False):
                assert answer(warm) == expected, f"replayed: {graphs.replaying}"
