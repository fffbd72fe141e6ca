"""How every verb reports: a table for people, JSON for programs."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

#: Words that colour a cell.
_COLOURS = {
    "applied": "green",
    "already-upstream": "cyan",
    "not-for-this-base": "dim",
    "target-missing": "red",
    "anchor-missing": "red",
    "anchor-count": "red",
    "region-changed": "red",
}


#: What a verb says of one thing.
Row = Mapping[str, object]


@dataclass(frozen=True)
class Table:
    """Rows to show: `columns` picks and orders the keys a person sees; JSON gets every key."""

    title: str
    rows: Sequence[Row]
    columns: tuple[str, ...]


def show(table: Table, as_json: bool) -> None:
    """Print `table` as one JSON list, or as a table as wide as the terminal."""
    if as_json:
        print(json.dumps(table.rows, indent=1))
        return
    out = RichTable(title=table.title, title_justify="left")
    for column in table.columns:
        out.add_column(column, overflow="fold")
    for row in table.rows:
        cells = (str(row.get(column, "")) for column in table.columns)
        out.add_row(*(f"[{_COLOURS[cell]}]{cell}[/]" if cell in _COLOURS else escape(cell) for cell in cells))
    # Where the output is no terminal, as in a log, it has no width to fit.
    console = Console()
    (console if console.is_terminal else Console(width=160)).print(out)


def say(message: str, payload: Row, as_json: bool) -> None:
    """Print one line for a person, or `payload` as JSON."""
    print(json.dumps(payload, indent=1) if as_json else message)
