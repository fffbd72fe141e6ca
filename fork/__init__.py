"""The tool that fetches base wheels, applies the patch series to them, and builds, exports and checks the fork."""

import sys
from pathlib import Path

if sys.version_info < (3, 11):  # noqa: UP036  what pip or a user starts it with is not chosen here
    sys.exit(f"fork: Python 3.11 or later is needed, {sys.executable} is {sys.version.split()[0]}")

#: Number of this fork's release, the `n` of the wheel version `<base>+reload.<n>`.
RELEASE = 1

#: The repository: patches/, vllm/ (overlay), tests/ and build/ are below it.
ROOT = Path(__file__).resolve().parent.parent
