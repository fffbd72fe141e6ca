"""Build the fork's wheel from a base wheel."""

import argparse
from pathlib import Path
from zipfile import ZipFile

from fork import ROOT
from fork.bases import find_base
from fork.report import say
from fork.wheel import build, default_device

HELP = "build the fork's wheel of a base and verify it"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--base", metavar="NAME", help="the base to build from")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="without it $VLLM_TARGET_DEVICE, else what is found")
    parser.add_argument(
        "--out", metavar="DIR", type=Path, default=ROOT / "build" / "wheels", help="where the wheel goes"
    )


def run(args: argparse.Namespace) -> int:
    base = find_base(args.base)
    device = args.device or default_device()
    path = build(base, device, args.out)
    count = len(ZipFile(path).namelist())
    payload = {"base": base.name, "device": device, "wheel": str(path), "files": count, "bytes": path.stat().st_size}
    say(f"{path}: {count} files, verified", payload, args.json)
    return 0
