# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The CPU expert prepack follows every weight update.

Two seeded checkpoints A and B share one architecture. A model that started on A and was
updated to B through the real layerwise reload must equal a model that started on B:
expert bytes, outputs, tokens and log-probabilities.
"""

import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from vllm import LLM, SamplingParams
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import (
    cleanup_dist_env_and_memory,
    init_distributed_environment,
    initialize_model_parallel,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT
from vllm.model_executor.model_loader import get_model
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.platforms import current_platform

pytestmark = pytest.mark.skipif(
    not current_platform.is_cpu(), reason="the expert prepack is a CPU step"
)

HIDDEN = 64
VOCAB = 96
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
ENGINE = {
    "dtype": "bfloat16",
    "enforce_eager": True,
    "skip_tokenizer_init": True,
    "max_model_len": 64,
}


def qwen3_moe(width: int) -> PreTrainedModel:
    config = Qwen3MoeConfig(
        num_experts=8, moe_intermediate_size=width, intermediate_size=HIDDEN, **SHAPE
    )
    return Qwen3MoeForCausalLM(config)


def mixtral(width: int) -> PreTrainedModel:
    return MixtralForCausalLM(
        MixtralConfig(num_local_experts=8, intermediate_size=width, **SHAPE)
    )


# 48 is no multiple of the kernel's 32: there the prepack pads too, and stores another
# shape than the checkpoint's.
CASES: dict[str, tuple[Callable[[int], PreTrainedModel], int]] = {
    "qwen3-moe": (qwen3_moe, 64),
    "qwen3-moe-padded": (qwen3_moe, 48),
    "mixtral": (mixtral, 64),
}


def save_checkpoint(path: Path, case: str, seed: int, std: float) -> Path:
    """Write a bf16 checkpoint drawn from one seed; a wide std keeps wrong experts
    visible through rounding.
    """
    build, width = CASES[case]
    torch.manual_seed(seed)
    model = build(width)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=std)
    model.to(torch.bfloat16).save_pretrained(path, safe_serialization=True)
    return path


@pytest.fixture(scope="module", params=CASES)
def checkpoints(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    return (
        save_checkpoint(root / "A", request.param, seed=1, std=0.05),
        save_checkpoint(root / "B", request.param, seed=2, std=0.12),
    )


@pytest.fixture
def one_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a process group of one; the group itself starts with the first
    model.
    """
    # get_model empties an accelerator cache, which raises outside a worker where there
    # is no accelerator.
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    yield f"file://{tmp_path}/group"
    cleanup_dist_env_and_memory()
    _ROPE_DICT.clear()


class Served:
    """A model as the worker loads it, with the real layerwise reload and one forward of
    every expert layer.
    """

    def __init__(self, checkpoint: Path, group: str):
        _ROPE_DICT.clear()  # else two models share one rotary embedding
        self.config: VllmConfig = EngineArgs(
            model=str(checkpoint), **ENGINE
        ).create_engine_config()
        with set_current_vllm_config(self.config):
            if not torch.distributed.is_initialized():
                init_distributed_environment(1, 0, group, 0, "gloo")
                initialize_model_parallel(1, 1)
            self.model = get_model(vllm_config=self.config)

    def update(self, checkpoint: Path) -> None:
        with set_current_vllm_config(self.config), torch.no_grad():
            initialize_layerwise_reload(self.model)
            self.model.load_weights(
                iter(load_file(checkpoint / "model.safetensors").items())
            )
            finalize_layerwise_reload(self.model, self.config.model_config)

    def experts(self) -> dict[str, torch.Tensor]:
        return {
            f"{path}.{name}": tensor
            for path, module in self.model.named_modules()
            if isinstance(
                getattr(module, "quant_method", None), UnquantizedFusedMoEMethod
            )
            for name, tensor in module.named_parameters(recurse=False)
        }

    def outputs(self) -> dict[str, torch.Tensor]:
        """Each MoE block (router and experts) on one seeded batch of 7 tokens, bf16."""
        tokens = torch.randn(7, HIDDEN, generator=torch.Generator().manual_seed(3)).to(
            torch.bfloat16
        )
        with (
            torch.no_grad(),
            set_current_vllm_config(self.config),
            set_forward_context(None, self.config),
        ):
            return {
                path: block(tokens.clone())
                for path, block in self.model.named_modules()
                if path.endswith((".mlp", ".block_sparse_moe"))
            }


def storage(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[object, ...]]:
    return {
        name: (t.data_ptr(), t.shape, t.stride(), t.dtype)
        for name, t in tensors.items()
    }


def assert_same_bits(
    got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]
) -> None:
    assert got.keys() == want.keys() and want
    wrong = [name for name in want if not torch.equal(got[name], want[name])]
    assert not wrong, f"{len(wrong)} of {len(want)} differ: {wrong}"


def test_updated_experts_equal_a_fresh_model(
    checkpoints: tuple[Path, Path], one_rank: str
) -> None:
    a, b = checkpoints
    fresh = {checkpoint: Served(checkpoint, one_rank) for checkpoint in checkpoints}
    out_a, out_b = fresh[a].outputs(), fresh[b].outputs()
    assert not any(torch.equal(out_a[name], out_b[name]) for name in out_a), (
        "A and B must differ"
    )
    warm = Served(a, one_rank)

    for checkpoint in (b, a, b):
        warm.update(checkpoint)

        assert_same_bits(warm.experts(), fresh[checkpoint].experts())
        assert_same_bits(warm.outputs(), fresh[checkpoint].outputs())


def test_updated_experts_keep_their_storage(
    checkpoints: tuple[Path, Path], one_rank: str
) -> None:
    a, b = checkpoints
    warm, fresh = Served(a, one_rank), Served(b, one_rank)
    captured = warm.experts()
    first = storage(captured)

    for update, checkpoint in enumerate((b, a, b), start=1):
        warm.update(checkpoint)
        assert storage(warm.experts()) == first, f"update {update}"

    assert_same_bits(captured, fresh.experts())


def live_tensor_bytes() -> int:
    """Bytes of every storage that Python can still reach, each counted once."""
    gc.collect()
    storages = (
        o.untyped_storage()
        for o in gc.get_objects()
        if type(o) in (torch.Tensor, torch.nn.Parameter)
    )
    return sum(
        {s.data_ptr(): s.nbytes() for s in storages if s.device.type == "cpu"}.values()
    )


def test_updates_leave_no_tensors_behind(tmp_path: Path, one_rank: str) -> None:
    a = save_checkpoint(tmp_path / "A", "qwen3-moe-padded", seed=1, std=0.05)
    b = save_checkpoint(tmp_path / "B", "qwen3-moe-padded", seed=2, std=0.12)
    warm = Served(a, one_rank)
    assert live_tensor_bytes() > sum(t.nbytes for t in warm.experts().values()) > 0
    held = []

    for checkpoint in (b, a, b, a):
        warm.update(checkpoint)
        held.append(live_tensor_bytes())

    assert held == [held[0]] * 4


def generate(llm: LLM) -> list[tuple[list[int], list[dict[int, float]]]]:
    """Greedy tokens and their top log-probabilities for four seeded prompts."""
    rng = torch.Generator().manual_seed(4)
    prompts = [
        {"prompt_token_ids": torch.randint(VOCAB, (n,), generator=rng).tolist()}
        for n in (3, 9, 17, 30)
    ]
    sampling = SamplingParams(
        temperature=0, max_tokens=12, logprobs=5, ignore_eos=True, detokenize=False
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


@pytest.fixture
def engine() -> Iterator[Callable[[Path], LLM]]:
    """Starts engines in this process, one at a time: a new one ends the one before."""

    def start(checkpoint: Path) -> LLM:
        cleanup_dist_env_and_memory()
        _ROPE_DICT.clear()
        return LLM(
            model=str(checkpoint),
            enable_prefix_caching=False,
            max_num_seqs=4,
            seed=0,
            **ENGINE,
        )

    yield start
    cleanup_dist_env_and_memory()


def test_updated_engine_generates_as_a_fresh_one(
    tmp_path: Path, engine: Callable[[Path], LLM]
) -> None:
    a = save_checkpoint(tmp_path / "A", "qwen3-moe", seed=1, std=0.05)
    b = save_checkpoint(tmp_path / "B", "qwen3-moe", seed=2, std=0.12)
    fresh = engine(b)
    want_b = generate(fresh)
    del fresh

    warm = engine(a)
    want_a = generate(warm)
    assert want_a != want_b
    warm.collective_rpc("reload_weights", kwargs={"weights_path": str(b)})
    got_b = generate(warm)
    warm.collective_rpc("reload_weights", kwargs={"weights_path": str(a)})
    got_a = generate(warm)

    assert got_b == want_b, "A->B against a fresh B"
    assert got_a == want_a, "A->B->A against A"
