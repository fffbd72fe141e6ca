"""Install the fork with its overlay files as links into this repository, for quick work on them."""

import argparse
import sysconfig
from pathlib import Path

from fork import ROOT
from fork.bases import find_base
from fork.evaluate import evaluate
from fork.files import wheel_reader
from fork.install import add_arguments, install
from fork.report import say
from fork.series import load_series
from fork.wheel import default_device

HELP = "install the fork into this environment, overlay files as links into the repository"

__all__ = ["HELP", "add_arguments", "run"]


def run(args: argparse.Namespace) -> int:
    wheel = install(args)
    base = find_base(args.base)
    results = evaluate(load_series(), base.version, wheel_reader(base.wheel(args.device or default_device())))
    place = Path(sysconfig.get_path("purelib"))
    linked = [path for r in results if r.files for path in r.patch.adds if path.startswith("vllm/")]
    for path in linked:
        (place / path).unlink()
        (place / path).symlink_to(ROOT / path)
    say(
        f"installed {wheel.name}; {len(linked)} overlay files are links",
        {"wheel": str(wheel), "links": linked},
        args.json,
    )
    return 0
