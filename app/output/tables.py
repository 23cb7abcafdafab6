"""Tables that fit the terminal by dropping whole columns, the least important first.

If even the fixed columns do not fit, a row becomes two lines: its first cell, and the others indented below. Only
columns with `least` (titles, names) are shortened, with an ellipsis. All commands print their tables here; the order in
which columns leave is a number in each column, not in this module.

Guard: tests/app/output/test_tables.py.
"""

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar, Union

from msgspec import Struct
from msgspec.structs import replace

from headrace.app.output.sanitise import sanitise
from headrace.app.output.terminal import console, table_width

if TYPE_CHECKING:
    from rich.text import Text

Cell = Union[str, "Text"]
_T = TypeVar("_T")
_GAP = 2  # cells between columns


class Column(Struct, frozen=True):
    """A column of a table.

    name: its heading.
    cells: one for each row.
    leaves: 0 stays; otherwise the column with the highest number is dropped first.
    right: aligned right.
    least: smallest width of a text that may be shortened; None: it may not.
    """

    name: str
    cells: Sequence[Cell]
    leaves: int = 0
    right: bool = True
    least: int | None = None

    @classmethod
    def of(
        cls, rows: Sequence[_T], name: str, cell: Callable[[_T], Cell], leaves: int = 0, *, right: bool = True
    ) -> "Column":
        """Make a column with the `cell` of each row. The other parameters: see the class."""
        return cls(name, [cell(row) for row in rows], leaves, right)

    @property
    def width(self) -> int:
        return max(_length(cell) for cell in (self.name, *self.cells))

    @property
    def narrowest(self) -> int:
        if self.least is None:
            return self.width
        return min(self.width, self.least)


def table_lines(
    columns: Sequence[Column], width: int | None, *, header: bool = True, rule: bool = True
) -> list["Text"]:
    """Return lines of at most `width` cells (None: unlimited), with a bold header and a rule.

    A line is longer only if a single figure is.
    """
    from rich.text import Text

    chosen = _fitting([replace(column, cells=[_shown(cell) for cell in column.cells]) for column in columns], width)
    groups = [(group, _widths(group, width)) for group in _groups(chosen, width)]
    body = []
    for row in range(len(chosen[0].cells)):
        body += [_line([column.cells[row] for column in group], group, widths) for group, widths in groups]
    if not header:
        return body
    head = [_line([column.name for column in group], group, widths, style="bold") for group, widths in groups]
    if rule:
        head.append(Text("─" * max(line.cell_len for line in (*head, *body)), style="dim"))
    return [*head, *body]


def print_table(columns: Sequence[Column], *, header: bool = True, rule: bool = True, stderr: bool = False) -> None:
    """Print a table at the terminal's width."""
    width = table_width(sys.stderr if stderr else sys.stdout)
    print_lines(table_lines(columns, width, header=header, rule=rule), stderr=stderr)


def print_apart(*columns: Column) -> None:
    """Print a table between empty lines."""
    print()
    print_table(columns)
    print()


def print_lines(lines: Sequence["Text"], *, stderr: bool = False) -> None:
    """Print without wrapping, styled only where `app.output.terminal` allows it."""
    screen = console(stderr=stderr)
    for line in lines:
        screen.print(line, no_wrap=True, overflow="ignore", crop=False)


def _fitting(columns: Sequence[Column], width: int | None) -> list[Column]:
    """Return the columns that fit; an empty column that may leave is dropped anyway."""
    columns_left = [column for column in columns if not column.leaves or any(map(_length, column.cells))]
    while width is not None and _total([column.narrowest for column in columns_left]) > width:
        droppable = [column for column in columns_left if column.leaves]
        if not droppable:
            break
        columns_left.remove(max(droppable, key=lambda column: column.leaves))
    return columns_left


def _groups(columns: list[Column], width: int | None) -> list[list[Column]]:
    """Group the columns by line: all in one, or the first alone and the others below it."""
    if width is None or _total([column.narrowest for column in columns]) <= width:
        return [columns]
    groups = [columns[:1], []]
    for column in columns[1:]:
        if groups[-1] and _GAP + _total([other.narrowest for other in (*groups[-1], column)]) > width:
            groups.append([])
        groups[-1].append(column)
    indent = Column("", [""] * len(columns[0].cells))  # its gap indents
    return [groups[0], *([indent, *group] for group in groups[1:] if group)]


def _widths(columns: Sequence[Column], limit: int | None) -> list[int]:
    """Return the width of each column, with columns that may be shortened as narrow as the limit asks."""
    widths = [column.width for column in columns]
    for index, column in enumerate(columns):
        if limit is not None and column.least is not None:
            widths[index] = max(column.narrowest, widths[index] - max(0, _total(widths) - limit))
    return widths


def _line(cells: Sequence[Cell], columns: Sequence[Column], widths: Sequence[int], style: str = "") -> "Text":
    """Return one line of cells in these widths, shortening text that does not fit."""
    from rich.text import Text

    padded = []
    for cell, column, width in zip(cells, columns, widths, strict=True):
        text = Text(cell) if isinstance(cell, str) else cell.copy()
        if column.least is not None:
            text.truncate(width, overflow="ellipsis")
        space = " " * (width - text.cell_len)
        if column.right:
            padded.append(Text.assemble(space, text))
        else:
            padded.append(Text.assemble(text, space))
    line = Text(style=style)
    line.append_text(Text(" " * _GAP).join(padded))
    line.rstrip()
    return line


def _shown(cell: Cell) -> Cell:
    """Return a cell's sanitised text on one line."""
    if isinstance(cell, str):
        return sanitise(cell).replace("\n", " ")
    return cell


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + _GAP * (len(widths) - 1)


def _length(cell: Cell) -> int:
    if isinstance(cell, str):
        from rich.cells import cell_len

        return cell_len(cell)
    return cell.cell_len
