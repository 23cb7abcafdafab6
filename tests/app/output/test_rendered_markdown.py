"""Rendered Markdown that stays in the scrollback, whatever the pieces and the window."""

import os
import re
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.app.output import rendered_markdown
from headrace.app.output.rendered_markdown import MarkdownOutput, rendered_lines

ANSWER = """# Birds

Some *emphasis*, **strong** and a [link](https://example.org/a_b).
A second line.

- one
- two
  - nested

1. first

   more of it
2. second

```python
def add(a, b):
    return a + b
```

| bird | wings |
|---|--:|
| kite | 2 |

> a quote

![pic](https://example.org/y.png) \\[ a_b_c \\] end.
"""
_ERASE = re.compile(r"\x1b\[(\d+)A\r\x1b\[J")


class Screen:
    """A terminal that appends lines, and erases from a line above the cursor on. height: lines that can be erased."""

    def __init__(self, height: int = 1000) -> None:
        self.lines: list[str] = []
        self.height = height

    def append(self, text: str) -> None:
        if (found := _ERASE.match(text)) is not None:
            rows = int(found[1])
            assert rows < self.height, "lines that left the window cannot be erased"
            del self.lines[len(self.lines) - rows :]
            text = text[found.end() :]
        assert "\x1b[J" not in text
        assert not text or text.endswith("\n")
        self.lines += text.splitlines()


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendered_markdown, "_PAUSE", 0.0)


def written(answer: str, cuts: list[int], size: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(rendered_markdown.shutil, "get_terminal_size", lambda: os.terminal_size(size))
    screen = Screen(size[1])
    output = MarkdownOutput(screen.append)
    places = sorted({0, *(cut for cut in cuts if cut < len(answer)), len(answer)})
    for start, end in pairwise(places):
        output.write(answer[start:end])
    output.end()
    return screen.lines


@settings(max_examples=8)
@given(st.lists(st.integers(0, len(ANSWER)), max_size=8), st.integers(20, 90), st.integers(4, 40))
def test_pieces_and_windows_do_not_change_the_scrollback(cuts: list[int], width: int, height: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        lines = written(ANSWER, cuts, (width, height), patch)
    assert lines == [line.text for line in rendered_lines(ANSWER, width - 1)]
    assert all(len(line) < width and line == line.rstrip() for line in lines)


def test_blocks_are_rendered_and_addresses_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "\n".join(written(ANSWER, [], (80, 24), monkeypatch))
    assert "Some emphasis, strong and a link (https://example.org/a_b).\nA second line.\n\n • one\n" in text
    assert "\n\n def add(a, b):\n     return a + b\n\n" in text
    assert text.endswith("▨ pic ⟨https://example.org/y.png⟩ \\[ a_b_c \\] end.")
    assert "\n\n\n" not in text


def test_a_second_answer_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendered_markdown.shutil, "get_terminal_size", lambda: os.terminal_size((80, 24)))
    screen = Screen()
    output = MarkdownOutput(screen.append)
    for answer in ("one\n\ntwo\n\nthree\n\nfour", "", "five"):
        output.write(answer)
        output.end()
    assert screen.lines == ["one", "", "two", "", "three", "", "four", "five"]
