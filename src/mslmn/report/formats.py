"""Tables for the console, as Markdown and as JSON."""

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.table import Table as RichTable
from rich.text import Text

from .tables import Column, Table


def clean(text: str) -> str:
    """One printable line: what a file name may hold that a page or a terminal may not."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def listed(names: Sequence[str]) -> str:
    """
    >>> listed(["LSTM"]), listed(["LSTM", "LMN", "MS-LMN"])
    ('LSTM', 'LSTM, LMN and MS-LMN')
    """
    return " and ".join(part for part in (", ".join(names[:-1]), *names[-1:]) if part)


def heading(column: Column, between: str) -> str:
    return f"{column.name}{between}{column.source}" if column.source else column.name


def to_rich(table: Table) -> RichTable:
    found = RichTable(
        title=Text(clean(table.title), style="bold"),
        caption=Text(clean(table.caption), style="dim"),
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for column in table.columns:
        found.add_column(
            Text(heading(column, "\n")),
            justify="right" if column.number else "left",
            overflow="fold",  # on a narrow console nothing is cut off
        )
    for i, row in enumerate(table.rows):
        found.add_row(
            *(Text(clean(table.text(i, j)), style="bold" if table.is_best(i, j) else "") for j in range(len(row)))
        )
    return found


def to_json(table: Table) -> dict[str, Any]:
    headings = [heading(column, ", ") for column in table.columns]
    rows = [dict(zip(headings, (cell.value for cell in row), strict=True)) for row in table.rows]
    return {"key": table.key, "title": table.title, "caption": table.caption, "rows": rows}


def to_markdown(table: Table) -> str:
    lines = [[escape(heading(column, ", ")) for column in table.columns]]
    lines.append([":--" if not column.number else "--:" for column in table.columns])
    for i, row in enumerate(table.rows):
        cells = [escape(table.text(i, j)) for j in range(len(row))]
        lines.append([f"**{cell}**" if table.is_best(i, j) else cell for j, cell in enumerate(cells)])
    body = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"### {escape(table.title)}\n\n{body}\n\n{escape(table.caption)}\n"


def escape(text: str) -> str:
    """Text that Markdown shows as it is."""
    return "".join(f"\\{letter}" if letter in r"\`*_[]<>|#&~$" else letter for letter in clean(text))
