"""Processes that a test has started."""

from contextlib import suppress

import psutil


def running(pids: list[int]) -> list[int]:
    """Those of `pids` that still run (a zombie does not)."""
    left = []
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                left.append(pid)
    return left
