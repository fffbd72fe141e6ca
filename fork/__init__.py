"""The tool that fetches base wheels, applies the patch series to them, and builds, exports and checks the fork."""

from pathlib import Path

#: Number of this fork's release, the `n` of the wheel version `<base>+reload.<n>`.
RELEASE = 1

#: The repository: patches/, vllm/ (overlay), tests/ and build/ are below it.
ROOT = Path(__file__).resolve().parent.parent
