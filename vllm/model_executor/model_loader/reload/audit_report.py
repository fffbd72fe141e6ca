# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What an audit found: on the terminal, as JSON, and as a page."""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

from vllm.model_executor.model_loader.reload.audit_jobs import Job
from vllm.model_executor.model_loader.reload.audit_run import Row
from vllm.version import __version__

_COLOURS = {
    "equal": "green",
    "unequal": "red",
    "not-auditable": "yellow",
    "error": "magenta",
}

#: Columns of a table that goes to no terminal.
_WIDTH = 160


class Report:
    """Collects rows, shows how far the audit is, and at the end a table; writes the
    files anew after every architecture, so that what is known is kept.
    """

    def __init__(
        self,
        groups: Mapping[str, str],
        json: Path | None,
        html: Path | None,
        total: int,
    ):
        self.rows: list[Row] = []
        self._groups, self._json, self._html = groups, json, html
        self._console = Console()
        if not self._console.is_terminal:
            self._console = Console(width=_WIDTH)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._task = self._progress.add_task("reload-audit", total=total)

    @property
    def all_equal(self) -> bool:
        return all(row.verdict in ("equal", "not-auditable") for row in self.rows)

    def __enter__(self) -> "Report":
        self._write()
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
        if self.rows:
            self._console.print(self._table())
            counts = Counter(row.verdict for row in self.rows)
            self._console.print(
                ", ".join(
                    f"[{_COLOURS[verdict]}]{counts[verdict]} {verdict}[/]"
                    for verdict in _COLOURS
                    if counts[verdict]
                )
            )

    def add(self, job: Job, rows: Sequence[Row]) -> None:
        """Take the rows of one architecture."""
        self.rows.extend(rows)
        self._progress.advance(self._task)
        self._progress.update(self._task, description=job.architecture)
        self._write()

    def interrupted(self) -> None:
        count = len(self.rows)
        kept = f"{count} verdict{'s' * (count != 1)} kept"
        self._progress.console.print(f"vllm reload-audit: interrupted, {kept}")

    def _write(self) -> None:
        if self._json:
            text = json.dumps(self._plain(), indent=1, allow_nan=False)
            _replace(self._json, text + "\n")
        if self._html:
            _replace(self._html, page(self._plain()))

    def _plain(self) -> list[dict[str, Any]]:
        return [
            {
                # JSON has no number for it.
                name: "Infinity" if value == math.inf else value
                for name, value in row.json().items()
            }
            | {"group": self._groups.get(row.architecture, "")}
            for row in self.rows
        ]

    def _table(self) -> Table:
        """A line for each architecture, a column for each mode."""
        modes = list(dict.fromkeys(row.mode for row in self.rows))
        table = Table()
        for title in ("architecture", *modes):
            table.add_column(title, no_wrap=True)
        table.add_column("tensors", justify="right")
        table.add_column("what differs, or why", no_wrap=True, overflow="ellipsis")
        for architecture in dict.fromkeys(row.architecture for row in self.rows):
            rows = {r.mode: r for r in self.rows if r.architecture == architecture}
            verdicts = [
                f"[{_COLOURS[rows[mode].verdict]}]{rows[mode].verdict}[/]"
                if mode in rows
                else ""
                for mode in modes
            ]
            reasons = dict.fromkeys(row.reason for row in rows.values() if row.reason)
            tensors = str(max(row.tensors for row in rows.values()) or "")
            table.add_row(architecture, *verdicts, tensors, escape("; ".join(reasons)))
        return table


def page(rows: Sequence[Mapping[str, Any]]) -> str:
    """One self-contained HTML page for `rows`."""
    template = files(__package__).joinpath("audit.html").read_text()
    found = {"version": __version__, "rows": rows}
    data = json.dumps(found, allow_nan=False).replace("<", "\\u003c")
    return template.replace("{{data}}", data)


def _replace(path: Path, text: str) -> None:
    """Write `path` so that a reader finds the old text or the new one."""
    if not path.is_file():  # a pipe, a terminal
        path.write_text(text)
        return
    beside = path.with_name(f".{path.name}.new")
    beside.write_text(text)
    beside.replace(path)
