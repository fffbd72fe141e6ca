# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""An engine that an audit starts, asks, updates and stops."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from vllm.model_executor.model_loader.reload.audit import Snapshot, from_plain
from vllm.model_executor.model_loader.reload.recorded_graph import checkpoint_layout
from vllm.platforms import current_platform

#: Rows of numbers that an engine answers with.
Outputs = tuple[tuple[float, ...], ...]

PROMPT_LENGTHS = (24, 37)
GENERATED_TOKENS = 3


class AuditedEngine:
    """An engine that holds one model. `call` runs a method on every worker, as
    `collective_rpc` does; `answer` says what the model answers, where it can be run.
    """

    def __init__(
        self, call: Callable[..., list[Any]], answer: Callable[[], Outputs] | None
    ):
        self._call = call
        self._answer = answer

    def snapshots(self) -> list[Snapshot]:
        """One for each worker."""
        return [from_plain(held) for held in self._call("audit_snapshot")]

    def outputs(self) -> Outputs | None:
        """What the model answers now; None where it cannot be run."""
        return self._answer() if self._answer else None

    def update(self, checkpoint: Path) -> None:
        """Load `checkpoint` as an update."""
        with _known_memory():
            self._call("reload_weights", kwargs={"weights_path": str(checkpoint)})

    def poison(self, seed: int = 0) -> None:
        """Put seeded garbage in the place of every weight."""
        self._call("audit_poison", args=(seed,))

    def graphs(self, on: bool) -> int:
        """Have steps of one token run by recorded graphs from now on, or no longer; how
        many there are.
        """
        return sum(self._call("audit_graphs", args=(on,)))


def _logits(llm: Any) -> Outputs:
    """The logits of the last prompt token and of each decode step, of the whole
    vocabulary, and the log-probabilities of the prompts' own tokens.
    """
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0,
        max_tokens=GENERATED_TOKENS,
        logprobs=-1,
        prompt_logprobs=0,
        ignore_eos=True,
        detokenize=False,
    )
    rows = []
    for prompt in prompts(llm.llm_engine.model_config.get_vocab_size()):
        given = [{"prompt_token_ids": prompt}]
        (answer,) = llm.generate(given, sampling, use_tqdm=False)
        of_prompt = zip(answer.prompt_logprobs[1:], prompt[1:], strict=True)
        rows.append(tuple(row[token].logprob for row, token in of_prompt))
        for row in answer.outputs[0].logprobs:
            rows.append(tuple(row[token].logprob for token in sorted(row)))
    return tuple(rows)


def prompts(vocabulary: int) -> Iterator[list[int]]:
    generator = torch.Generator().manual_seed(0)
    for length in PROMPT_LENGTHS:
        yield torch.randint(3, vocabulary, (length,), generator=generator).tolist()


#: What both kinds of engine are started with.
_OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "enable_prefix_caching": False,
    "max_model_len": 64,
    "max_num_seqs": 2,
    "max_logprobs": -1,
    "logprobs_mode": "raw_logits",
    "worker_extension_cls": (
        "vllm.model_executor.model_loader.reload.audit.AuditWorker"
    ),
}


@contextmanager
def engine(
    checkpoint: Path, *, graphs: bool = False, **options: Any
) -> Iterator[AuditedEngine]:
    """An engine that serves `checkpoint`, as users start it. With `graphs` its steps
    can be recorded: linears keep the checkpoint's layout.
    """
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    with ExitStack() as stack:
        stack.callback(cleanup_dist_env_and_memory)
        if graphs:
            stack.enter_context(checkpoint_layout())
        with _known_memory():
            llm = LLM(model=str(checkpoint), **_OPTIONS | options)
        stack.callback(llm.llm_engine.engine_core.shutdown)
        yield AuditedEngine(llm.collective_rpc, partial(_logits, llm))


@contextmanager
def loader(
    checkpoint: Path, *, backend: str = "", **options: Any
) -> Iterator[AuditedEngine]:
    """The workers of an engine with the model loaded, and nothing else: for a model
    that this device cannot run. `backend` is the path of the attention backend of a
    layer for which this device has none; it is built, and never run.
    """
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    with ExitStack() as stack:
        stack.callback(cleanup_dist_env_and_memory)
        stack.enter_context(_attention(backend or _UNRUN))
        # The caches of this model may have no block size that this device takes.
        stack.enter_context(
            patch.object(type(current_platform), "update_block_size_for_backend")
        )
        arguments = EngineArgs(model=str(checkpoint), **_OPTIONS | options)
        config = arguments.create_engine_config()
        with _known_memory():
            executor = UniProcExecutor(config)
        stack.callback(executor.shutdown)
        yield AuditedEngine(executor.collective_rpc, None)


@contextmanager
def _known_memory() -> Iterator[None]:
    """New memory of this process is filled with NaN or the largest integer meanwhile:
    what nobody writes is the same in every engine, and never what was there before.
    """
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


#: The backend for sparse attention where a recipe names none.
_UNRUN = "vllm.v1.attention.backends.mla.cpu_mla.CPUMLABackend"


@contextmanager
def _attention(backend: str) -> Iterator[None]:
    """Attention layers made meanwhile get `backend` where the device has none."""
    from vllm.v1.worker.workspace import (
        init_workspace_manager,
        is_workspace_manager_initialized,
    )

    choose = current_platform.get_attn_backend_cls

    def chosen(cls: type, *args: Any, **kwargs: Any) -> str:
        try:
            return choose(*args, **kwargs)
        except NotImplementedError:
            return backend

    if not is_workspace_manager_initialized():
        init_workspace_manager(torch.device("cpu"))
    with patch.object(
        type(current_platform), "get_attn_backend_cls", classmethod(chosen)
    ):
        yield
