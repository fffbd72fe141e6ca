"""One process of `graph_ab`: a real engine whose decode steps run by recorded graph, updated from A to B.

Linears stay in the checkpoint's layout, as they do on a GPU; on a CPU they would be packed behind native handles.
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


@contextmanager
def _engine(checkpoint: Path) -> Iterator[tuple[Any, Any]]:
    """An engine in this process that serves `checkpoint`, and its model's forward by recorded graph."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.model_executor.model_loader.reload.recorded_graph import GraphedForward

    llm = LLM(
        model=str(checkpoint),
        dtype="bfloat16",
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


def answers(case: str, a: Path, b: Path) -> dict[str, list[Answer]]:
    """What an engine of this tree answers on B in `case`, eager and replayed."""
    from vllm.model_executor.model_loader.reload.inventory import poison

    with _engine(b if case == "fresh" else a) as (llm, forward):
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
    parser.add_argument("--out", type=Path, required=True, help="JSON file for the answers")
    options = parser.parse_args()

    from vllm.model_executor.model_loader.reload.recorded_graph import checkpoint_layout

    with checkpoint_layout():
        found = {case: answers(case, options.checkpoints / "A", options.checkpoints / "B") for case in options.cases}
    plain = {
        case: {how: [asdict(answer) for answer in given] for how, given in both.items()} for case, both in found.items()
    }
    options.out.write_text(json.dumps(plain))


if __name__ == "__main__":
    main()
