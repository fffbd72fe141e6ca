"""One process of `graph_ab`: a real engine whose decode steps run by graph, updated from A to B.

On a GPU these are CUDA graphs, and sleep is the engine's own. On a CPU they are recorded graphs; level-1 sleep does
nothing, and level-2 sleep is modelled by garbage in every weight. Linears stay in the checkpoint's layout there, as
they do on a GPU (they would be packed behind native handles), and the product of a block-wise fp8 linear, for which
most CPUs have no kernel, is that of its dequantized weight.
"""

import argparse
import json
from collections.abc import Callable, Collection, Iterator, MutableMapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar, Protocol

from benchmarks import tiny_gpt_oss
from benchmarks.live_update import Answer

#: What happens between the first answers on A and the update to B: the level of the sleep. `fresh` starts on B.
CASES = {"fresh": 0, "kept": 1, "poisoned": 2}
GENERATED_TOKENS = 16
PROMPTS = 4


class Graphs(Protocol):
    """The graphs of an engine's one-token steps."""

    #: Of the engine, for there to be any.
    options: ClassVar[dict[str, Any]]

    def __init__(self, llm: Any): ...

    @staticmethod
    def kind() -> Any:
        """The class of a graph; its method `replay` runs the step."""

    def count(self) -> int:
        """How many there are."""

    def turn_off(self) -> None:
        """Have every later step run eagerly."""

    def sleep(self, level: int) -> None:
        """Put the engine to sleep and wake it up."""


class Recorded:
    """Recorded graphs, on a CPU."""

    options: ClassVar[dict[str, Any]] = {"enforce_eager": True}

    def __init__(self, llm: Any):
        from vllm.model_executor.model_loader.reload.recorded_graph import GraphedForward

        # Not the model's own forward: what the graphs hold must not count as the model's.
        runner = _runner(llm)
        self._model = runner.model
        self._forward = runner._model_forward = GraphedForward(runner._model_forward)

    @staticmethod
    def kind() -> Any:
        from vllm.model_executor.model_loader.reload.recorded_graph import RecordedGraph

        return RecordedGraph

    def count(self) -> int:
        return len(self._forward.graphs)

    def turn_off(self) -> None:
        self._forward.replaying = False

    def sleep(self, level: int) -> None:
        from vllm.model_executor.model_loader.reload.inventory import poison

        if level == 2:
            poison(self._model)


class Captured:
    """CUDA graphs, captured when the engine starts."""

    options: ClassVar[dict[str, Any]] = {
        "enable_sleep_mode": True,
        "gpu_memory_utilization": 0.3,
        "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1]},
    }

    def __init__(self, llm: Any):
        self._llm, runner = llm, _runner(llm)
        self._graphs: Collection[Any]
        self._dispatched: list[MutableMapping[Any, Any] | set[Any]]
        if hasattr(runner, "cudagraph_manager"):
            self._graphs, self._dispatched = runner.cudagraph_manager.graphs, [runner.cudagraph_manager._candidates]
        else:  # the older model runner, which 0.25.1 takes for GPT-OSS
            self._graphs = runner.model.concrete_cudagraph_entries
            self._dispatched = list(runner.cudagraph_dispatcher.cudagraph_keys.values())

    @staticmethod
    def kind() -> Any:
        import torch

        return torch.cuda.CUDAGraph

    def count(self) -> int:
        return len(self._graphs)

    def turn_off(self) -> None:
        for keys in self._dispatched:
            keys.clear()

    def sleep(self, level: int) -> None:
        self._llm.sleep(level=level)
        self._llm.wake_up()


@contextmanager
def _engine(checkpoint: Path, backend: str) -> Iterator[tuple[Any, Graphs]]:
    """An engine in this process that serves `checkpoint`, and its graphs."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.platforms import current_platform

    graphs: type[Graphs] = Recorded if current_platform.is_cpu() else Captured
    with ExitStack() as stack:
        if graphs is Recorded:
            from vllm.model_executor.model_loader.reload.recorded_graph import checkpoint_layout

            stack.enter_context(checkpoint_layout())
            _add_fp8_kernel()
        llm = LLM(
            model=str(checkpoint),
            dtype="bfloat16",
            attention_backend=backend,
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            max_model_len=128,
            max_num_seqs=4,
            max_logprobs=tiny_gpt_oss.VOCABULARY,
            **graphs.options,
        )
        stack.callback(cleanup_dist_env_and_memory)
        stack.callback(llm.llm_engine.engine_core.shutdown)
        yield llm, graphs(llm)


def count_replays(kind: Any) -> Callable[[], int]:
    """Says how many graphs of the class `kind` this process has replayed since this call."""
    replay, count = kind.replay, 0

    def counting(graph: Any) -> Any:
        nonlocal count
        count += 1
        return replay(graph)

    kind.replay = counting
    return lambda: count


def _runner(llm: Any) -> Any:
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner


def _add_fp8_kernel() -> None:
    """Have vLLM take a kernel for block-wise fp8 linears that runs on any CPU. It keeps the weight as it is."""
    import torch

    from vllm.model_executor.kernels import linear
    from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import Fp8BlockScaledMMLinearKernel
    from vllm.model_executor.layers.quantization.utils.quant_utils import scaled_dequantize
    from vllm.platforms.interface import PlatformEnum

    class Dequantized(Fp8BlockScaledMMLinearKernel):  # type: ignore[misc]
        apply_input_quant = False

        @classmethod
        def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
            return True, None

        def apply_block_scaled_mm(
            self, A: torch.Tensor, B: torch.Tensor, As: torch.Tensor, Bs: torch.Tensor
        ) -> torch.Tensor:
            return torch.nn.functional.linear(A, scaled_dequantize(B, Bs, self.weight_group_shape, A.dtype))

    linear._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU].insert(0, Dequantized)


def _ask(llm: Any) -> list[Answer]:
    """Greedy answers to seeded prompts, one after the other, with the log-probability of the whole vocabulary."""
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0, max_tokens=GENERATED_TOKENS, logprobs=tiny_gpt_oss.VOCABULARY, ignore_eos=True, detokenize=False
    )
    answers = []
    for prompt in tiny_gpt_oss.prompts(PROMPTS):
        output = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)[0].outputs[0]
        rows = tuple({token: entry.logprob for token, entry in row.items()} for row in output.logprobs)
        answers.append(Answer(tuple(output.token_ids), (), rows))
    return answers


def answers(case: str, a: Path, b: Path, backend: str) -> dict[str, list[Answer]]:
    """What an engine of this tree answers on B in `case`, eager and replayed.

    Raises AssertionError where a graph is made after the update, a step of the replayed answers but the first of each
    is no replay, or one of the eager answers is.
    """
    with _engine(b if case == "fresh" else a, backend) as (llm, graphs):
        replays = count_replays(graphs.kind())
        _ask(llm)
        if level := CASES[case]:
            graphs.sleep(level)
            llm.collective_rpc("reload_weights", kwargs={"weights_path": str(b)})
        made, before = graphs.count(), replays()
        replayed = _ask(llm)
        assert graphs.count() == made > 0, f"{made} graphs before the answers, {graphs.count()} after them"
        found, wanted = replays() - before, PROMPTS * (GENERATED_TOKENS - 1)
        assert found >= wanted, f"{found} steps were replayed, not {wanted}"
        graphs.turn_off()
        before = replays()
        eager = _ask(llm)
        assert replays() == before, f"{replays() - before} steps of the eager answers were replayed"
        return {"eager": eager, "replay": replayed}


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("checkpoints", type=Path, help="folder that holds A and B")
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--backend", required=True, help="vLLM's name of the attention backend")
    parser.add_argument("--out", type=Path, required=True, help="JSON file for the answers")
    options = parser.parse_args()

    found = answers(options.case, options.checkpoints / "A", options.checkpoints / "B", options.backend)
    options.out.write_text(json.dumps({how: [asdict(answer) for answer in given] for how, given in found.items()}))


if __name__ == "__main__":
    main()
