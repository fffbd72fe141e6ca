"""How the tests of the tool run it and look at what it did."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BASE = "0.32.0"


@dataclass(frozen=True)
class Done:
    """How one run of the tool ended."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    def refuses(self, *words: str, status: int = 1) -> None:
        """It said no in one line that has these words, and nothing else."""
        lines = self.err.strip().splitlines()
        assert self.status == status, (self.status, self.out, self.err)
        assert len(lines) == 1 and lines[0].startswith("fork: "), self.err
        for word in words:
            assert word in lines[0], (word, lines[0])


def run_fork(root: Path, *args: object, **env: str) -> Done:
    """Run `python -m fork ARGS` as a user does, in the repository at `root`."""
    done = subprocess.run(
        [sys.executable, "-m", "fork", *map(str, args)], cwd=root, env=os.environ | env, capture_output=True, text=True
    )
    return Done(done.returncode, done.stdout, done.stderr)


def snapshot(folder: Path) -> dict[str, bytes]:
    """Every file below `folder` with its bytes."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
