# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The `reload-audit` subcommand."""

import argparse
import sys
import typing

from vllm.entrypoints.cli.types import CLISubcommand

if typing.TYPE_CHECKING:
    from vllm.utils.argparse_utils import FlexibleArgumentParser
else:
    FlexibleArgumentParser = argparse.ArgumentParser

DESCRIPTION = """Show whether a weight update equals a fresh start.

An engine that starts on a checkpoint A and is updated to B is compared with one that
starts on B: the bytes of every tensor that the model reaches, where each lies, and what
the model answers. For an architecture, A and B are tiny and seeded; --model and
--update name real ones. Exit status: 0 all equal, 1 some not, 2 bad usage.
"""


class ReloadAuditSubcommand(CLISubcommand):
    """Shows whether a weight update equals a fresh start."""

    name = "reload-audit"

    @staticmethod
    def cmd(args: argparse.Namespace) -> None:
        # Not before it is asked for: it imports all of vLLM.
        from vllm.model_executor.model_loader.reload.audit_command import main

        sys.exit(main(args))

    def subparser_init(
        self, subparsers: argparse._SubParsersAction
    ) -> FlexibleArgumentParser:
        summary, _, _ = DESCRIPTION.partition("\n")
        usage = "vllm reload-audit [ARCH ... | --all | --model A --update B] [...]"
        parser = subparsers.add_parser(
            "reload-audit", help=summary, description=DESCRIPTION, usage=usage
        )
        add_arguments(parser)
        return parser


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the subcommand."""
    parser.add_argument(
        "architectures", nargs="*", metavar="ARCH", help="as in vLLM's registry"
    )
    parser.add_argument(
        "--all", action="store_true", help="every architecture of the registry"
    )
    parser.add_argument(
        "--group",
        nargs="+",
        help="of the registry, for --all: text-generation, pooling, multimodal, "
        "drafter or transformers",
    )
    parser.add_argument("--model", metavar="A", help="folder of a real checkpoint")
    parser.add_argument(
        "--update", metavar="B", help="folder of another one of the same model"
    )
    parser.add_argument(
        "--tp", type=int, default=1, help="tensor-parallel size (default: 1)"
    )
    parser.add_argument("--quantization", help="of the engine, as in `vllm serve`")
    parser.add_argument(
        "--dtype", default="auto", help="of the engine, as in `vllm serve`"
    )
    parser.add_argument(
        "--mode",
        nargs="+",
        help="same (A to A), update (A to B, the default), back (A to B to A), repeat "
        "(ten updates in a row) or poisoned",
    )
    parser.add_argument(
        "--poison",
        action="store_true",
        help="also with garbage in every weight before the update to B, as after a "
        "level-2 sleep: short for --mode poisoned",
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=2,
        help="architectures audited at the same time (default: 2)",
    )
    parser.add_argument("--json", metavar="FILE", help="write the verdicts there")
    parser.add_argument("--html", metavar="FILE", help="write a page for people there")


def cmd_init() -> list[CLISubcommand]:
    return [ReloadAuditSubcommand()]
