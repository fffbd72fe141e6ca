# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A running GPT-OSS engine whose update changes the sinks and nothing else answers as a
fresh engine does.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GptOssConfig, GptOssForCausalLM

from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.platforms import current_platform

VOCABULARY = 128
PROMPT_LENGTHS = (3, 9, 17, 30)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two bf16 checkpoints of one model, which differ in the sinks alone."""
    torch.manual_seed(1)
    config = GptOssConfig(
        num_hidden_layers=2,
        num_local_experts=4,
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
    model = GptOssForCausalLM(config).to(torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.08)
    a, b = tmp_path_factory.mktemp("A"), tmp_path_factory.mktemp("B")
    for folder in (a, b):
        model.save_pretrained(folder)
    tensors = load_file(b / "model.safetensors")
    sinks = [name for name in tensors if name.endswith(".sinks")]
    assert len(sinks) == 2
    for name in sinks:
        tensors[name] = torch.randn(4).to(torch.bfloat16) + 3
    save_file(tensors, b / "model.safetensors", metadata={"format": "pt"})
    return a, b


@contextmanager
def engine(checkpoint: Path, ranks: int) -> Iterator[LLM]:
    """A server of `checkpoint` on `ranks` tensor-parallel ranks, ended at the end."""
    llm = LLM(
        model=str(checkpoint),
        tensor_parallel_size=ranks,
        dtype="bfloat16",
        enforce_eager=True,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_model_len=64,
        max_num_seqs=4,
        seed=0,
    )
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        cleanup_dist_env_and_memory()


def generate(llm: LLM) -> list[tuple[list[int], list[dict[int, float]]]]:
    """Greedy tokens and their top log-probabilities for four seeded prompts."""
    rng = torch.Generator().manual_seed(4)
    prompts = [
        {"prompt_token_ids": torch.randint(VOCABULARY, (n,), generator=rng).tolist()}
        for n in PROMPT_LENGTHS
    ]
    sampling = SamplingParams(
        temperature=0, max_tokens=8, logprobs=5, ignore_eos=True, detokenize=False
    )
    return [
        (
            list(request.outputs[0].token_ids),
            [
                {token: entry.logprob for token, entry in step.items()}
                for step in request.outputs[0].logprobs
            ],
        )
        for request in llm.generate(prompts, sampling, use_tqdm=False)
    ]


@pytest.mark.parametrize("ranks", [1, 2])
def test_new_sinks_reach_a_running_engine(
    checkpoints: tuple[Path, Path], ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(
        "VLLM_ENABLE_V1_MULTIPROCESSING", "0"
    )  # fewer processes to start
    if current_platform.is_cpu():
        # Ranks share cores and memory, however few; by default each rank takes most of
        # the memory.
        monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    a, b = checkpoints
    with engine(b, ranks) as fresh:
        want = generate(fresh)
    with engine(a, ranks) as warm:
        before = generate(warm)
        assert before != want, "the sinks must matter"
        warm.collective_rpc("reload_weights", kwargs={"weights_path": str(b)})
        assert generate(warm) == want
        warm.collective_rpc("reload_weights", kwargs={"weights_path": str(a)})
        assert generate(warm) == before
