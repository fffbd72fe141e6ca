# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A recorded graph computes what the step computes, and reads memory as a captured CUDA
graph does.
"""

import os
from collections.abc import Callable
from pathlib import Path

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from vllm import LLM, SamplingParams
from vllm import _custom_ops as ops
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.model_executor.layers import utils as layer_utils
from vllm.model_executor.model_loader.reload.recorded_graph import (
    GraphedForward,
    GraphError,
    checkpoint_layout,
    record,
)
from vllm.platforms import current_platform
from vllm.utils.torch_utils import direct_register_custom_op

WIDTH = 32


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(
        torch.bfloat16
    )


class Attention(torch.nn.Module):
    """One head over a cache, with what a step is made of: views, slices, in-place
    writes, casts, a derived tensor.
    """

    def __init__(self) -> None:
        super().__init__()
        self.project = torch.nn.Parameter(
            draw(1, 3 * WIDTH, WIDTH), requires_grad=False
        )
        self.derived = draw(2, WIDTH, WIDTH)
        self.cache = torch.zeros(2, 16, WIDTH, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        query, key, value = torch.nn.functional.linear(x, self.project).chunk(3, dim=-1)
        self.cache[0].index_copy_(0, position, key)
        self.cache[1].index_copy_(0, position, value)
        scores = (query @ self.cache[0].t()).float()
        scores[:, torch.arange(16) > 8] = -1.0
        output = torch.empty_like(query)
        torch.mm(scores.softmax(-1).to(x.dtype), self.cache[1], out=output)
        return (output + x).flatten() @ self.derived.repeat(1, 1)


def slot(position: int) -> torch.Tensor:
    return torch.tensor([position])


@pytest.fixture
def model() -> Attention:
    return Attention()


@pytest.fixture
def recorded(model: Attention) -> Callable[..., torch.Tensor]:
    """A graph of one step of `model`, called with fresh inputs; it leaves the model's
    cache empty.
    """
    x, position = draw(3, 1, WIDTH), slot(0)
    graph = record(lambda: model(x, position))
    model.cache.zero_()

    def replay(fresh: torch.Tensor, at: int) -> torch.Tensor:
        x.copy_(fresh)
        position.fill_(at)
        return graph.replay().clone()

    return replay


def test_replays_with_fresh_inputs_equal_eager_steps_and_write_the_same_cache(
    model: Attention, recorded: Callable[..., torch.Tensor]
) -> None:
    eager = Attention()
    for position in (0, 3, 1, 15):
        x = draw(10 + position, 1, WIDTH)
        assert torch.equal(recorded(x, position), eager(x, slot(position)))
        assert torch.equal(model.cache, eager.cache)


def test_a_cache_that_others_write_is_read_as_it_is(
    model: Attention, recorded: Callable[..., torch.Tensor]
) -> None:
    eager = Attention()
    for each in (model, eager):
        each.cache.copy_(draw(5, 2, 16, WIDTH))
    x = draw(6, 1, WIDTH)
    assert torch.equal(recorded(x, 2), eager(x, slot(2)))


@pytest.mark.parametrize("name", ["project", "derived"])
def test_a_tensor_written_in_place_is_seen(
    model: Attention, recorded: Callable[..., torch.Tensor], name: str
) -> None:
    x = draw(6, 1, WIDTH)
    before = recorded(x, 2)
    getattr(model, name).mul_(2)
    eager = Attention()
    getattr(eager, name).mul_(2)
    after = recorded(x, 2)
    assert torch.equal(after, eager(x, slot(2))) and not torch.equal(after, before)


def bind_attribute(model: Attention) -> None:
    model.derived = model.derived * 2


def bind_parameter(model: Attention) -> None:
    model.project = torch.nn.Parameter(model.project * 2, requires_grad=False)


def bind_data(model: Attention) -> None:
    model.project.data = model.project * 2


@pytest.mark.parametrize("bind", [bind_attribute, bind_parameter, bind_data])
def test_a_tensor_bound_anew_is_not_seen(
    model: Attention,
    recorded: Callable[..., torch.Tensor],
    bind: Callable[[Attention], None],
) -> None:
    x = draw(6, 1, WIDTH)
    before = recorded(x, 2)
    bind(model)
    assert torch.equal(recorded(x, 2), before)
    assert not torch.equal(model(x, slot(2)), before)


def test_what_a_graph_reads_is_what_it_did_not_make(model: Attention) -> None:
    x, position = draw(3, 1, WIDTH), slot(0)
    graph = record(lambda: model(x, position))
    held = {tensor.data_ptr() for tensor in graph.reads}
    assert held == {
        tensor.data_ptr()
        for tensor in (x, position, model.project, model.derived, model.cache)
    }


@pytest.mark.parametrize(
    ("step", "operator"),
    [
        (lambda x: x.nonzero(), "aten.nonzero"),
        (lambda x: x[x > 0], "aten.index.Tensor"),
        (lambda x: x.masked_select(x > 0), "aten.masked_select"),
        (lambda x: x.unique(), "aten._unique2"),
        (lambda x: torch.where(x > 0)[0], "aten.nonzero"),
        (lambda x: x.repeat_interleave(x.long().abs()), "aten.repeat_interleave"),
        (lambda x: x[(x > 0).to(torch.uint8)], "aten.index.Tensor"),
        (
            lambda x: torch.ops.aten.index.Tensor_out(x, [x > 0], out=torch.empty(2)),
            "aten.index.Tensor_out",
        ),
    ],
)
def test_an_output_shape_that_depends_on_data_is_refused_by_name(
    step: Callable[[torch.Tensor], torch.Tensor], operator: str
) -> None:
    x = torch.tensor([1.0, -2.0, 3.0])
    with pytest.raises(
        GraphError, match=f"^{operator}.* its output shape depends on data$"
    ):
        record(lambda: step(x))


def test_indices_that_are_numbers_are_recorded() -> None:
    x, rows = torch.arange(6.0), torch.tensor([1, 4])
    graph = record(lambda: x[rows] + 1)
    rows.copy_(torch.tensor([0, 5]))
    assert graph.replay().tolist() == [1.0, 6.0]


@pytest.mark.parametrize(
    "read",
    [lambda x: x[0].item() > 0, lambda x: bool(x[0] > 0), lambda x: x.tolist()[0] > 0],
)
def test_a_branch_that_the_host_took_guards_the_replay(
    read: Callable[[torch.Tensor], bool],
) -> None:
    x, y = torch.tensor([1.0, 2.0]), torch.tensor([5.0])
    graph = record(lambda: y * 2 if read(x) else y * 3)
    y.fill_(7.0)
    assert graph.replay().item() == 14.0
    x[0] = -1.0
    with pytest.raises(GraphError, match="the host read"):
        graph.replay()


WEIGHTS = {"layer": torch.tensor([2.0])}


def scaled(x: torch.Tensor, layer: str) -> torch.Tensor:
    return x * WEIGHTS[layer]


direct_register_custom_op(
    "recorded_graph_scaled", scaled, fake_impl=lambda x, layer: torch.empty_like(x)
)


def test_an_operator_written_in_python_is_looked_into() -> None:
    """As attention is: it finds its layer by name, so a tensor bound anew as well."""
    x, held = torch.tensor([3.0]), WEIGHTS["layer"]
    graph = record(lambda: torch.ops.vllm.recorded_graph_scaled(x, "layer") + 1)
    held.fill_(4.0)
    assert graph.replay().item() == 13.0
    WEIGHTS["layer"] = torch.tensor([100.0])
    assert graph.replay().item() == 13.0
    WEIGHTS["layer"] = held.fill_(2.0)


@torch.library.custom_op("recorded_graph_test::scaled", mutates_args=())
def scaled_elsewhere(x: torch.Tensor, layer: str) -> torch.Tensor:
    return scaled(x, layer)


def test_so_is_one_of_another_library() -> None:
    x, held = torch.tensor([3.0]), WEIGHTS["layer"]
    graph = record(lambda: scaled_elsewhere(x, "layer") + 1)
    WEIGHTS["layer"] = torch.tensor([100.0])
    assert graph.replay().item() == 7.0
    WEIGHTS["layer"] = held


@pytest.mark.skipif(not current_platform.is_cpu(), reason="a kernel for CPUs")
def test_a_native_operator_that_writes_without_saying_so_is_run_again() -> None:
    """As vLLM's attention does: its schema marks no argument as written."""
    key, value = draw(1, 3, 2, WIDTH), draw(2, 3, 2, WIDTH)
    caches = torch.zeros(2, 4, 2, 16, WIDTH, dtype=torch.bfloat16)
    slots = torch.tensor([1, 17, 33])

    def step() -> None:
        ops.cpu_attn_reshape_and_cache(key, value, *caches, slots, "vec")

    graph = record(step)
    written = caches.clone()
    caches.zero_()
    graph.replay()
    assert torch.equal(caches, written) and caches.any()


def test_a_constant_that_the_step_writes_to_starts_anew_in_each_replay() -> None:
    x = torch.tensor([1.0])

    def step() -> torch.Tensor:
        return torch.tensor([1.0, 2.0]).mul_(x + 2) * 1

    graph = record(step)
    for value in (1.0, 0.0, 3.0):
        x.fill_(value)
        assert torch.equal(graph.replay(), step())


def test_an_output_keeps_its_place_whatever_its_tensor_is_given() -> None:
    x = torch.tensor([1.0])
    given = []
    graph = record(lambda: given.append(x * 2) or given[0])
    given[0].data = torch.tensor([9.0])
    x.fill_(3.0)
    assert graph.replay().item() == 6.0


def test_an_assertion_of_the_step_is_one_of_each_replay() -> None:
    x = torch.tensor([1.0])

    def step() -> torch.Tensor:
        torch._assert_async(x > 0)
        return x * 2

    graph = record(step)
    x.fill_(-1.0)
    with pytest.raises(RuntimeError):
        graph.replay()


@pytest.mark.parametrize("value", [float("nan"), 0.0, -0.0, True])
def test_a_guard_holds_for_the_same_bits_alone(value: float) -> None:
    x, y = torch.tensor([value]), torch.tensor([1.0])
    for read in (lambda: x.item(), lambda: x.tolist()):
        graph = record(lambda read=read: (read(), y * 2)[1])
        assert graph.replay().item() == 2.0
        kept = x.clone()
        x.neg_() if x.is_floating_point() else x.logical_not_()
        if value == value:
            with pytest.raises(GraphError, match="the host read"):
                graph.replay()
        x.copy_(kept)


RANDOM = {
    "aten.rand": lambda x: torch.rand(3),
    "aten.bernoulli": lambda x: torch.bernoulli(x.abs().clamp(max=1)),
    "aten.native_dropout": lambda x: torch.native_dropout(x, 0.5, True),
    "aten.exponential_": lambda x: x.clone().exponential_(),
}


@pytest.mark.parametrize("operator", RANDOM)
def test_random_values_are_refused_by_name(operator: str) -> None:
    with pytest.raises(GraphError, match=f"^{operator}.*its values are random$"):
        record(lambda: RANDOM[operator](torch.tensor([1.0, -2.0, 3.0])))


def test_attention_that_drops_nothing_is_recorded() -> None:
    x = torch.randn(1, 2, 4, 8)
    graph = record(
        lambda: torch.nn.functional.scaled_dot_product_attention(x, x, x) + 0
    )
    x.mul_(0.5)
    assert torch.equal(
        graph.replay(), torch.nn.functional.scaled_dot_product_attention(x, x, x)
    )


NOT_PLAIN = {
    "torch.sparse_coo": lambda x: torch.sparse.mm(x.to_sparse(), x),
    "torch._mkldnn": lambda x: x.to_mkldnn().to_dense(),
    "quantized": lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
    "conjugated": lambda x: x.to(torch.complex64).conj() * 2,
}


@pytest.mark.parametrize("kind", NOT_PLAIN)
def test_a_tensor_that_is_no_view_of_plain_memory_is_refused(kind: str) -> None:
    with pytest.raises(GraphError, match=f"{kind} tensor"):
        record(lambda: NOT_PLAIN[kind](torch.eye(3)))


def test_what_may_move_a_tensor_is_refused() -> None:
    x = torch.zeros(2)
    with pytest.raises(GraphError, match=r"^aten\.resize_.*may move a tensor$"):
        record(lambda: x.resize_(5))


def test_a_step_that_returns_another_object_is_refused() -> None:
    with pytest.raises(GraphError, match="returns a object"):
        record(object)


def test_the_checkpoint_layout_ends_with_its_block() -> None:
    packing = layer_utils.dispatch_cpu_unquantized_gemm
    with checkpoint_layout():
        assert layer_utils.dispatch_cpu_unquantized_gemm is not packing
    assert layer_utils.dispatch_cpu_unquantized_gemm is packing


@pytest.mark.skipif(
    not current_platform.is_cpu(), reason="oneDNN's handles are a CPU matter"
)
def test_a_native_handle_is_refused() -> None:
    """An update packs anew and frees the handle; a replay over it would read freed
    memory.
    """
    handle = ops.create_onednn_mm(draw(1, WIDTH, WIDTH).float())
    x = draw(2, 1, WIDTH).float()
    with pytest.raises(GraphError, match=r"^_C\.onednn_mm.* native object"):
        record(lambda: ops.onednn_mm(handle, x, None))


@pytest.mark.skipif(not current_platform.is_cpu(), reason="a GPU has graphs of its own")
def test_an_engine_decodes_by_replay_as_it_does_eagerly(tmp_path: Path) -> None:
    torch.manual_seed(1)
    config = Qwen3Config(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        initializer_range=0.2,
    )
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path)
    with checkpoint_layout():
        llm = LLM(
            str(tmp_path),
            enforce_eager=True,
            skip_tokenizer_init=True,
            max_model_len=64,
            enable_prefix_caching=False,
        )
    try:
        model = llm.llm_engine.model_executor.driver_worker.worker.model_runner.model
        graphed = model.forward = GraphedForward(model.forward)

        def answer(prompt: list[int]) -> tuple[list[int], list[dict[int, float]]]:
            sampling = SamplingParams(
                temperature=0,
                max_tokens=6,
                logprobs=5,
                ignore_eos=True,
                detokenize=False,
            )
            output = llm.generate(
                [{"prompt_token_ids": prompt}], sampling, use_tqdm=False
            )[0].outputs[0]
            return list(output.token_ids), [
                {t: p.logprob for t, p in row.items()} for row in output.logprobs
            ]

        prompts = [[1, 2, 3, 4], [9, 8, 7, 6]]
        graphed.replaying = False
        eager = [answer(prompt) for prompt in prompts]
        assert eager[0] != eager[1] and not graphed.graphs
        graphed.replaying = True
        assert answer(prompts[0]) == eager[0]
        recorded = len(graphed.graphs)
        assert recorded == 5  # one for each position after the first token
        assert [answer(prompt) for prompt in reversed(prompts)] == eager[::-1]
        assert len(graphed.graphs) == recorded

        # Values change in place, as an update has them: the graphs see it.
        model.model.norm.weight.data.mul_(torch.linspace(-2, 2, 64).to(torch.bfloat16))
        replayed = answer(prompts[1])
        graphed.replaying = False
        assert answer(prompts[1]) == replayed != eager[1]
    finally:
        llm.llm_engine.engine_core.shutdown()
        cleanup_dist_env_and_memory()
