"""Build the fork's wheel and install it into the environment of the running interpreter."""

import argparse
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from packaging.metadata import Metadata
from wheel.wheelfile import WheelFile

from fork import ROOT, pip
from fork.bases import find_base
from fork.errors import ForkError
from fork.report import say
from fork.wheel import build, default_device, other_vllm

HELP = "build the fork's wheel and install it into this environment"

#: PyTorch's own index of CPU builds, for machines whose indexes lack the build that the base asks for.
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--base", metavar="NAME", help="the base to build from")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="without it $VLLM_TARGET_DEVICE, else what is found")


def install(args: argparse.Namespace) -> Path:
    """Build and install the wheel that `args` name; return its path.

    Raises ForkError, installing nothing, where another vLLM owns the same files in this environment.
    """
    base, device = find_base(args.base), args.device or default_device()
    installed = other_vllm()
    for other in installed:
        if "+reload." not in other:
            name = other.split()[0]
            raise ForkError(f"{other} is installed here and owns the same files; `pip uninstall {name}` first")
    wheel = build(base, device, ROOT / "build" / "wheels")
    pip.install(*(["--quiet"] if installed else []), *_torch_index(wheel), str(wheel))
    if installed:
        # The version alone does not say which patches are in it, so pip keeps an older build of the same version.
        pip.install("--quiet", "--force-reinstall", "--no-deps", str(wheel))
    return wheel


def _torch_index(wheel: Path) -> list[str]:
    """The option that adds PyTorch's CPU index, where the torch build a CPU wheel asks for is not to be had without."""
    with WheelFile(wheel) as archive:
        wanted = Metadata.from_email(archive.read(f"{archive.dist_info_path}/METADATA")).requires_dist or []
    for requirement in wanted:
        exact = re.fullmatch(r"==(\S+\+cpu)", str(requirement.specifier))
        if requirement.name == "torch" and exact and (not requirement.marker or requirement.marker.evaluate()):
            at_hand = _has("torch", exact[1]) or pip.offers("torch", exact[1])
            return [] if at_hand else ["--extra-index-url", TORCH_CPU_INDEX]
    return []


def _has(distribution: str, wanted: str) -> bool:
    try:
        return version(distribution) == wanted
    except PackageNotFoundError:
        return False


def run(args: argparse.Namespace) -> int:
    wheel = install(args)
    say(f"installed {wheel.name}", {"wheel": str(wheel)}, args.json)
    return 0
