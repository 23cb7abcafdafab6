"""Markdown as styled lines of a given width.

markdown-it parses, Pygments highlights. Model text is only text: a link or image shows its whole
address and cannot be clicked, HTML shows as written, and no line is parsed as markup. Line breaks are kept.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from textual.content import Content, Span

from headrace.app.output.markdown_parser import image_text, parser

if TYPE_CHECKING:
    from markdown_it.token import Token

_INLINE_STYLE = {"em_open": "italic", "strong_open": "bold", "s_open": "strike"}
_HEADING_STYLE = {"h1": "bold underline $text-primary", "h2": "bold $text-primary", "h3": "bold $text-secondary"}
_BULLETS = "•◦▪"
_TASKS = {"[ ] ": "☐ ", "[x] ": "☑ ", "[X] ": "☑ "}
_CODE_INLINE = "$text-warning"
_LINK = "underline"
_QUIET = "$quiet"
BLANK = Content("")
_MIN_WIDTH = 12  # nesting stops narrowing the text here


def render(source: str, width: int, *, ansi: bool = False, dark: bool = True) -> list[Content]:
    """Return `source` as lines of at most `width` cells, a blank line between blocks."""
    return render_tokens(parser().parse(source), width, ansi=ansi, dark=dark)


def render_tokens(tokens: Sequence["Token"], width: int, *, ansi: bool = False, dark: bool = True) -> list[Content]:
    """Return parsed blocks as lines; see `render`."""
    return _Renderer(ansi, dark).blocks(list(tokens), max(width, _MIN_WIDTH))


class _Renderer:
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
                for line in self.blocks(inner, width - 2, depth)
            ]
        if head.type in ("fence", "code_block"):
            return self._code(head.content, head.info.split()[0] if head.info.split() else "", width)
        if head.type == "hr":
            return [Content.styled("─" * width, "$foreground 25%")]
        if head.type == "table_open":
            return _table(inner, width)
        return Content(head.content).wrap(width) if head.content else []

    def _list(self, head: "Token", tokens: list["Token"], width: int, depth: int) -> list[Content]:
        """Return items with a hanging indent, without blank lines if the list is tight."""
        tight = all(
            token.hidden for token in tokens if token.type == "paragraph_open" and token.level == head.level + 2
        )
        number = int(head.attrs.get("start", 1)) if head.type == "ordered_list_open" else None
        lines: list[Content] = []
        position = 0
        while position < len(tokens):
            end = _end_of(tokens, position)
            mark = f"{number}. " if number is not None else _task(tokens[position + 1 : end])
            mark = mark or f"{_BULLETS[depth % len(_BULLETS)]} "
            body = self.blocks(tokens[position + 1 : end], max(width - len(mark), _MIN_WIDTH), depth + 1, tight)
            if lines and not tight:
                lines.append(BLANK)
            for index, line in enumerate(body or [Content("")]):
                lead = (mark, "bold $text-primary") if index == 0 else (" " * len(mark), "")
                lines.append(Content.assemble(lead, line))
            number = number + 1 if number is not None else None
            position = end + 1
        return lines

    def _code(self, code: str, language: str, width: int) -> list[Content]:
        """Return a code block, its language above it."""
        head = Content.assemble(("▏", "$foreground 40%"), (f" {language}" if language else "", "italic $quiet"))
        body = self._highlighted(code.rstrip("\n").expandtabs(4), language)
        return [*([head] if language else []), *_barred(body, width)]

    def _highlighted(self, code: str, language: str) -> Content:
        if not language:
            return Content.styled(code, "$text")
        # Pygments is imported with the first code block.
        from headrace.app.tui.transcript.code_theme import AnsiDarkCodeTheme, AnsiLightCodeTheme, CodeTheme, coloured

        ansi = AnsiDarkCodeTheme if self._dark else AnsiLightCodeTheme
        return coloured(code, language, ansi if self._ansi else CodeTheme)


def code_lines(code: str, width: int) -> list[Content]:
    """Return code without colours and head."""
    return _barred(Content.styled(code.rstrip("\n").expandtabs(4), "$text"), width)


def _barred(code: Content, width: int) -> list[Content]:
    """Return code with a bar at its left; long lines are folded."""
    lines = []
    for line in code.split("\n", allow_blank=True):
        for part in line.fold(width - 2) if line.cell_length > width - 2 else [line]:
            lines.append(Content.assemble(("▏ ", "$foreground 40%"), part))
    return lines


def _task(item: list["Token"]) -> str:
    """Take the box of a task out of a list item and return it; "" for another item."""
    if len(item) < 2 or item[0].type != "paragraph_open" or not item[1].children:
        return ""
    first = item[1].children[0]
    box = _TASKS.get(first.content[:4], "") if first.type == "text" else ""
    if box:
        first.content = first.content[4:]
    return box


def _inline(token: "Token") -> Content:
    """Return the text of a paragraph, heading or cell with its emphasis; an address follows its link."""
    text: list[str] = []
    spans: list[Span] = []
    open_styles: list[tuple[int, str]] = []
    address = ""
    length = 0
    for child in token.children or []:
        if child.type in _INLINE_STYLE or child.type == "link_open":
            open_styles.append((length, _INLINE_STYLE.get(child.type, _LINK)))
            address = str(child.attrs["href"]) if child.type == "link_open" else address
            continue
        if child.type.endswith("_close"):
            start, style = open_styles.pop()
            spans.append(Span(start, length, style))
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
    return image_text(child) if child.type == "image" else child.content


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
    columns = max(len(row) for row in rows)
    wanted = [max((row[c].cell_length for row in rows if c < len(row)), default=1) or 1 for c in range(columns)]
    room = max(width - 3 * (columns - 1), columns * 3)
    if sum(wanted) > room:
        fair = room // columns
        spare = room - sum(min(cells, fair) for cells in wanted)
        wide = sum(cells > fair for cells in wanted)
        wanted = [min(cells, fair + spare // wide) if cells > fair else cells for cells in wanted]
    lines: list[Content] = []
    for number, cells in enumerate(rows):
        wrapped = [cell.wrap(max(size, 2)) for cell, size in zip(cells, wanted, strict=False)]
        for index in range(max(len(cell) for cell in wrapped)):
            parts: list[Content | tuple[str, str]] = []
            for cell, size, side in zip(wrapped, wanted, sides, strict=False):
                part = cell[index] if index < len(cell) else Content("")
                part = part.stylize("bold") if number == 0 else part
                parts += [_aligned(part, size, side), (" │ ", "$foreground 30%")]
            lines.append(Content.assemble(*parts[:-1]))
        if number == 0:
            lines.append(Content.styled("─┼─".join("─" * size for size in wanted), "$foreground 30%"))
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
