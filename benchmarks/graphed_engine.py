"""One process of `graph_ab`: a real engine whose decode steps run by recorded graph, updated from A to B.

Linears stay in the checkpoint's layout, as they do on a GPU; on a CPU they would be packed behind native handles. The
product of a block-wise fp8 linear, for which most CPUs have no kernel, is that of its dequantized weight.
"""

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import tiny_gpt_oss
from benchmarks.live_update import Answer

#: What happens to an engine that has recorded its graphs on A, before it answers; `fresh` records them on B.
CASES = ("fresh", "kept", "poisoned")
GENERATED_TOKENS = 16


def _add_fp8_kernel() -> None:
    """Have vLLM take a kernel for block-wise fp8 linears that runs on any CPU. It keeps the weight as it is."""
    import torch
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import Fp8BlockScaledMMLinearKernel
    from vllm.model_executor.layers.quantization.utils.quant_utils import scaled_dequantize
    from vllm.platforms.interface import PlatformEnum

    class Dequantized(Fp8BlockScaledMMLinearKernel):
        apply_input_quant = False

        @classmethod
        def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
            return True, None

        def apply_block_scaled_mm(
            self, A: torch.Tensor, B: torch.Tensor, As: torch.Tensor, Bs: torch.Tensor
        ) -> torch.Tensor:
            return torch.nn.functional.linear(A, scaled_dequantize(B, Bs, self.weight_group_shape, A.dtype))

    linear._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU].insert(0, Dequantized)


@contextmanager
def _engine(checkpoint: Path, backend: str) -> Iterator[tuple[Any, Any]]:
    """An engine in this process that serves `checkpoint`, and its model's forward by recorded graph."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.model_executor.model_loader.reload.recorded_graph import GraphedForward

    llm = LLM(
        model=str(checkpoint),
        dtype="bfloat16",
        attention_backend=backend,
        enforce_eager=True,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_model_len=128,
        max_num_seqs=4,
        max_logprobs=tiny_gpt_oss.VOCABULARY,
    )

    try:
        # Not the model's own forward: what the graphs hold must not count as the model's.
        runner = _runner(llm)
        runner._model_forward = GraphedForward(runner._model_forward)
        yield llm, runner._model_forward
    finally:
        llm.llm_engine.engine_core.shutdown()
        cleanup_dist_env_and_memory()


def _runner(llm: Any) -> Any:
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner


def _ask(llm: Any) -> list[Answer]:
    """Greedy answers to seeded prompts, one after the other, with the log-probability of the whole vocabulary."""
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0, max_tokens=GENERATED_TOKENS, logprobs=tiny_gpt_oss.VOCABULARY, ignore_eos=True, detokenize=False
    )
    answers = []
    for prompt in tiny_gpt_oss.prompts(count=4):
        output = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)[0].outputs[0]
        rows = tuple({token: entry.logprob for token, entry in row.items()} for row in output.logprobs)
        answers.append(Answer(tuple(output.token_ids), (), rows))
    return answers


def answers(case: str, a: Path, b: Path, backend: str) -> dict[str, list[Answer]]:
    """What an engine of this tree answers on B in `case`, eager and replayed."""
    from vllm.model_executor.model_loader.reload.inventory import poison

    with _engine(b if case == "fresh" else a, backend) as (llm, forward):
        _ask(llm)
        if case == "poisoned":
            poison(_runner(llm).model)
        if case != "fresh":
            llm.collective_rpc("reload_weights", kwargs={"weights_path": str(b)})
        recorded = len(forward.graphs)
        replayed = _ask(llm)
        assert len(forward.graphs) == recorded > 0, "a step was recorded after the update"
        forward.replaying = False
        return {"eager": _ask(llm), "replay": replayed}


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("checkpoints", type=Path, help="folder that holds A and B")
    parser.add_argument("cases", nargs="+", choices=CASES)
    parser.add_argument("--backend", required=True, help="vLLM's name of the attention backend")
    parser.add_argument("--out", type=Path, required=True, help="JSON file for the answers")
    options = parser.parse_args()

    from vllm.model_executor.model_loader.reload.recorded_graph import checkpoint_layout

    a, b = options.checkpoints / "A", options.checkpoints / "B"
    _add_fp8_kernel()
    with checkpoint_layout():
        found = {case: answers(case, a, b, options.backend) for case in options.cases}
    plain = {
        case: {how: [asdict(answer) for answer in given] for how, given in both.items()} for case, both in found.items()
    }
    options.out.write_text(json.dumps(plain))


if __name__ == "__main__":
    main()
