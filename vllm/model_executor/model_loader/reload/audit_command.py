# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""`vllm reload-audit`: checks what is asked for, runs it, and reports."""

import argparse
import difflib
import json
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from vllm.model_executor.model_loader.reload.audit_jobs import Job, run
from vllm.model_executor.model_loader.reload.audit_report import Report
from vllm.model_executor.model_loader.reload.audit_run import MODES
from vllm.model_executor.models import registry

#: The architectures of the registry, by what they are for.
GROUPS: dict[str, tuple[str, ...]] = {
    "text-generation": ("_TEXT_GENERATION_MODELS",),
    "pooling": (
        "_EMBEDDING_MODELS",
        "_LATE_INTERACTION_MODELS",
        "_REWARD_MODELS",
        "_TOKEN_CLASSIFICATION_MODELS",
        "_SEQUENCE_CLASSIFICATION_MODELS",
    ),
    "multimodal": ("_MULTIMODAL_MODELS",),
    "drafter": ("_SPECULATIVE_DECODING_MODELS",),
    "transformers": (
        "_TRANSFORMERS_SUPPORTED_MODELS",
        "_TRANSFORMERS_BACKEND_MODELS",
    ),
}


class UsageError(ValueError):
    """The command cannot do what it is asked for; the text says why in one line."""


def main(args: argparse.Namespace) -> int:
    """Run the command. The exit status: 0 all equal, 1 some not, 2 bad usage, 130
    interrupted.
    """
    try:
        jobs = _jobs(args)
        report = Report(
            groups(), _writable(args.json), _writable(args.html), total=len(jobs)
        )
    except UsageError as error:
        print(f"vllm reload-audit: {error}", file=sys.stderr)
        return 2
    _environment(args)
    with report:
        try:
            for job, rows in run(jobs, args.jobs):
                report.add(job, rows)
        except KeyboardInterrupt:
            report.interrupted()
            return 130
    return 0 if report.all_equal else 1


def groups() -> dict[str, str]:
    """The group of each architecture; that of the first that has it."""
    found: dict[str, str] = {}
    for group, tables in GROUPS.items():
        for table in tables:
            for architecture in getattr(registry, table, ()):
                found.setdefault(architecture, group)
    return found


def _jobs(args: argparse.Namespace) -> list[Job]:
    given = [bool(args.architectures), args.all, bool(args.model or args.update)]
    if sum(given) != 1:
        raise UsageError("name architectures, or --all, or --model and --update")
    if args.group and not args.all:
        raise UsageError("--group chooses from --all")
    if bool(args.model) != bool(args.update):
        raise UsageError("--model and --update go together")
    if args.tp < 1 or args.jobs < 1:
        raise UsageError("--tp and --jobs are at least 1")
    modes = tuple(dict.fromkeys(args.mode or ["update"]))
    if args.poison and "poisoned" not in modes:
        modes += ("poisoned",)
    _known(modes, MODES, "mode")
    options: dict[str, Any] = {"tensor_parallel_size": args.tp, "dtype": args.dtype}
    if args.quantization:
        options["quantization"] = args.quantization
    if args.model:
        a, b = Path(args.model), Path(args.update)
        return [Job(_same_architecture(a, b), modes, options, (a, b))]
    known = groups()
    if args.all:
        _known(args.group or [], GROUPS, "group")
        chosen = [
            architecture
            for architecture, group in known.items()
            if group in (args.group or GROUPS)
        ]
    else:
        chosen = list(dict.fromkeys(args.architectures))
        _known(chosen, known, "architecture")
    return [Job(architecture, modes, options) for architecture in chosen]


def _known(names: Iterable[str], known: Mapping[str, Any], what: str) -> None:
    for name in names:
        if name in known:
            continue
        if len(known) < 10:
            raise UsageError(f"unknown {what} {name}; one of {', '.join(known)}")
        near = difflib.get_close_matches(name, known, 3, 0.5)
        offered = f"; near it: {', '.join(near)}" if near else ""
        raise UsageError(f"unknown {what} {name}{offered}")


def _same_architecture(a: Path, b: Path) -> str:
    """The architecture of two real checkpoints, of which every file can be read."""
    (first,), (second,) = _architectures(a), _architectures(b)
    if first != second:
        raise UsageError(f"{b} is a checkpoint of {second}, and {a} one of {first}")
    for folder in (a, b):
        _check_files(folder)
    return first


def _architectures(folder: Path) -> list[str]:
    try:
        config = json.loads((folder / "config.json").read_text())
        (architecture,) = config["architectures"]
    except OSError as error:
        raise UsageError(f"{folder / 'config.json'}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise UsageError(f"{folder / 'config.json'} names no architecture") from None
    return [architecture]


def _check_files(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    try:
        files = (
            set(json.loads(index.read_text())["weight_map"].values())
            if index.exists()
            else {path.name for path in folder.glob("*.safetensors")}
        )
    except (ValueError, KeyError, AttributeError):
        raise UsageError(f"{index} is no index of safetensors") from None
    if not files:
        raise UsageError(f"{folder} holds no safetensors")
    for name in sorted(files):
        try:
            with safe_open(folder / name, "pt"):
                pass
        except FileNotFoundError:
            raise UsageError(f"{folder / name} is missing") from None
        except (OSError, SafetensorError) as error:
            raise UsageError(f"{folder / name} cannot be read: {error}") from None


def _writable(name: str | None) -> Path | None:
    """The file that a report goes to, before the hours that it takes to have one."""
    if name is None:
        return None
    path = Path(name)
    try:
        path.open("a").close()
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    return path


def _environment(args: argparse.Namespace) -> None:
    """What the processes that audit find in their environment, where the user has set
    nothing else.
    """
    threads = max(1, (os.cpu_count() or 1) // args.jobs)
    defaults = {
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(threads),
        "PYTHONWARNINGS": "ignore",
    }
    if not args.model:
        defaults["HF_HUB_OFFLINE"] = "1"
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
