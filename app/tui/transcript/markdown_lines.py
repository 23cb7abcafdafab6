"""Markdown as styled lines of a given width.

markdown-it parses, Pygments highlights. Model text is only text: a link or image shows its whole
address and cannot be clicked, HTML shows as written, and no line is parsed as markup. Line breaks are kept.

`GrowingMarkdown` is the user. A new kind of block is a case in `_Renderer._block`, a new inline style a row of
`_INLINE_STYLE`. tests/tui/test_parts.py and test_safety.py guard the lines.
"""

from collections.abc import Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING

from textual.content import Content, Span

from headrace.app.output.markdown_parser import image_text, parser

if TYPE_CHECKING:
    from markdown_it.token import Token
    from textual.highlight import HighlightTheme

_INLINE_STYLE = {"em_open": "italic", "strong_open": "bold", "s_open": "strike", "link_open": "underline"}
_HEADING_STYLE = {"h1": "bold underline $text-primary", "h2": "bold $text-primary", "h3": "bold $text-secondary"}
_BULLETS = "•◦▪"
_TASKS = {"[ ] ": "☐ ", "[x] ": "☑ ", "[X] ": "☑ "}
_CODE_INLINE = "$text-warning"
_QUIET = "$quiet"
BLANK = Content("")
_MIN_WIDTH = 12  # neither nesting nor a narrow terminal makes the text of a block narrower


def render(source: str, width: int, *, ansi: bool = False, dark: bool = True) -> list[Content]:
    """Return `source` as lines, a blank line between blocks.

    width: cells of a line. Below `_MIN_WIDTH` cells, in deep nesting and in tables of many columns, lines are longer.
    """
    return render_tokens(parser().parse(source), width, ansi=ansi, dark=dark)


def render_tokens(tokens: Sequence["Token"], width: int, *, ansi: bool = False, dark: bool = True) -> list[Content]:
    """Return parsed blocks as lines; see `render`."""
    return _Renderer(ansi, dark).blocks(list(tokens), max(width, _MIN_WIDTH))


class _Renderer:
    """Makes lines of parsed blocks. ansi, dark: of the terminal's theme, for the colours of code."""

    def __init__(self, ansi: bool, dark: bool) -> None:
        self._ansi = ansi
        self._dark = dark

    def blocks(self, tokens: list["Token"], width: int, depth: int = 0, tight: bool = False) -> list[Content]:
        """Return sibling blocks as lines."""
        lines: list[Content] = []
        position = 0
        while position < len(tokens):
            end = _end_of(tokens, position)
            block = self._block(tokens[position : end + 1], width, depth)
            if lines and block and not tight:
                lines.append(BLANK)
            lines += block
            position = end + 1
        return lines

    def _block(self, tokens: list["Token"], width: int, depth: int) -> list[Content]:
        """Return the lines of one block. tokens: from the one that opens it to the one that closes it."""
        head = tokens[0]
        inner = tokens[1:-1]
        if head.type == "paragraph_open":
            return _inline(inner[0]).wrap(width)
        if head.type == "heading_open":
            style = _HEADING_STYLE.get(head.tag, "bold")
            return [line.stylize(style) for line in _inline(inner[0]).wrap(width)]
        if head.type in ("bullet_list_open", "ordered_list_open"):
            return self._list(head, inner, width, depth)
        if head.type == "blockquote_open":
            return [
                Content.assemble(("▎ ", "$text-secondary"), line.stylize_before(_QUIET))
                for line in self.blocks(inner, max(width - 2, _MIN_WIDTH), depth)
            ]
        if head.type in ("fence", "code_block"):
            language = (head.info.split() or [""])[0]  # "python title=x.py" has more after it
            return self._code(head.content, language, width)
        if head.type == "hr":
            return [Content.styled("─" * width, "$foreground 25%")]
        if head.type == "table_open":
            return _table(inner, width)
        if head.content:
            return Content(head.content).wrap(width)
        return []

    def _list(self, head: "Token", tokens: list["Token"], width: int, depth: int) -> list[Content]:
        """Return items with a hanging indent, without blank lines if the list is tight."""
        tight = all(
            token.hidden for token in tokens if token.type == "paragraph_open" and token.level == head.level + 2
        )
        is_numbered = head.type == "ordered_list_open"
        number = int(head.attrs.get("start", 1))
        lines: list[Content] = []
        position = 0
        while position < len(tokens):
            end = _end_of(tokens, position)
            item = tokens[position + 1 : end]
            mark = f"{number}. "
            if not is_numbered:
                mark = _task(item) or f"{_BULLETS[depth % len(_BULLETS)]} "
            body = self.blocks(item, max(width - len(mark), _MIN_WIDTH), depth + 1, tight)
            if lines and not tight:
                lines.append(BLANK)
            first, *others = body or [BLANK]
            lines.append(Content.assemble((mark, "bold $text-primary"), first))
            lines += [Content.assemble(" " * len(mark), line) for line in others]
            number += 1
            position = end + 1
        return lines

    def _code(self, code: str, language: str, width: int) -> list[Content]:
        """Return a code block, its language above it."""
        if not language:
            return code_lines(code, width)
        head = Content.assemble(("▏", "$foreground 40%"), (f" {language}", "italic $quiet"))
        return [head, *_barred(self._highlighted(_code_text(code), language), width)]

    def _highlighted(self, code: str, language: str) -> Content:
        """Return code with the colours of the theme."""
        # Pygments is imported with the first code block.
        from headrace.app.tui.transcript.code_theme import AnsiDarkCodeTheme, AnsiLightCodeTheme, CodeTheme, coloured

        theme: type[HighlightTheme] = CodeTheme
        if self._ansi:
            theme = AnsiDarkCodeTheme if self._dark else AnsiLightCodeTheme
        return coloured(code, language, theme)


def code_lines(code: str, width: int) -> list[Content]:
    """Return code without colours and head."""
    return _barred(Content.styled(_code_text(code), "$text"), width)


def _code_text(code: str) -> str:
    return code.rstrip("\n").expandtabs(4)


def _barred(code: Content, width: int) -> list[Content]:
    """Return code with a bar at its left; long lines are folded."""
    lines = []
    for line in code.split("\n", allow_blank=True):
        parts = [line]
        if line.cell_length > width - 2:
            parts = line.fold(width - 2)
        lines += [Content.assemble(("▏ ", "$foreground 40%"), part) for part in parts]
    return lines


def _task(item: list["Token"]) -> str:
    """Take the box of a task out of a list item and return it; "" for another item."""
    if len(item) < 2 or item[0].type != "paragraph_open" or not item[1].children:
        return ""
    first = item[1].children[0]
    if first.type != "text" or first.content[:4] not in _TASKS:
        return ""
    box = _TASKS[first.content[:4]]
    first.content = first.content[4:]
    return box


def _inline(token: "Token") -> Content:
    """Return the text of a paragraph, heading or cell with its emphasis; an address follows its link."""
    # Styles are spans of characters: a style begins at an opening token, and its span is made at the closing one.
    text: list[str] = []
    spans: list[Span] = []
    open_styles: list[tuple[int, str]] = []  # (first character, style), the innermost last
    address = ""
    length = 0
    for child in token.children or []:
        if child.type == "link_open":
            address = str(child.attrs["href"])
        if child.type in _INLINE_STYLE:
            open_styles.append((length, _INLINE_STYLE[child.type]))
            continue
        if child.type.endswith("_close"):
            start, style = open_styles.pop()
            spans.append(Span(start, length, style))
            # A link with its address as text needs no second one.
            if child.type == "link_close" and "".join(text)[start:] != address:
                piece = f" ⟨{address}⟩"
                spans.append(Span(length, length + len(piece), _QUIET))
                text.append(piece)
                length += len(piece)
            continue
        piece = _piece(child)
        if child.type == "code_inline":
            spans.append(Span(length, length + len(piece), _CODE_INLINE))
        text.append(piece)
        length += len(piece)
    return Content("".join(text), spans)


def _piece(child: "Token") -> str:
    """Return the text of an inline token."""
    if child.type in ("softbreak", "hardbreak"):
        return "\n"
    if child.type == "image":
        return image_text(child)
    return child.content


def _table(tokens: list["Token"], width: int) -> list[Content]:
    """Return a table: columns as wide as their cells if that fits, else shares of the width."""
    rows: list[list[Content]] = []
    sides: list[str] = []  # alignment of each column
    for token in tokens:
        if token.type == "tr_open":
            rows.append([])
        elif token.type == "th_open":
            sides.append(str(token.attrs.get("style", "")).removeprefix("text-align:"))
        elif token.type == "inline":
            rows[-1].append(_inline(token))
    rows[0] = [cell.stylize("bold") for cell in rows[0]]
    sizes = [max(1, *(cell.cell_length for cell in column)) for column in zip_longest(*rows, fillvalue=BLANK)]
    room = max(width - 3 * (len(sizes) - 1), len(sizes) * 3)
    if sum(sizes) > room:
        # Columns that need less than an equal share leave the rest of it to the wide ones.
        equal = room // len(sizes)
        spare = room - sum(min(size, equal) for size in sizes)
        max_size = equal + spare // sum(size > equal for size in sizes)
        sizes = [min(size, max_size) for size in sizes]
    lines: list[Content] = []
    for number, cells in enumerate(rows):
        wrapped = [cell.wrap(max(size, 2)) for cell, size in zip(cells, sizes, strict=False)]
        for parts in zip_longest(*wrapped, fillvalue=BLANK):
            aligned = [_aligned(part, size, side) for part, size, side in zip(parts, sizes, sides, strict=False)]
            lines.append(Content.styled(" │ ", "$foreground 30%").join(aligned))
        if number == 0:
            lines.append(Content.styled("─┼─".join("─" * size for size in sizes), "$foreground 30%"))
    return lines


def _aligned(cell: Content, size: int, side: str) -> Content:
    """Pad to `size` cells. side: left, right, center, or "" for left."""
    spare = max(0, size - cell.cell_length)
    left = {"right": spare, "center": spare // 2}.get(side, 0)
    return cell.pad_left(left).pad_right(spare - left)


def _end_of(tokens: list["Token"], start: int) -> int:
    """Return the index of the token that closes the block opened at `start`."""
    depth = 0
    for position in range(start, len(tokens)):
        depth += tokens[position].nesting
        if depth == 0:
            return position
    return len(tokens) - 1
