"""The first token in which a prompt differs from an earlier sequence: the reason why its cached K/V end there.

Answers report it, and the decode view shows it.

Guard: tests/models/text/test_prefix_difference.py.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import asdict

from headrace.runtime.kv.common_prefix import common_prefix

if TYPE_CHECKING:
    from headrace.models.text.tokenizer import Tokenizer

_BEFORE = 12  # tokens of the text before a difference
_AFTER = 8  # and from it on


class PrefixDifference(Struct, frozen=True):
    """Place and text of a difference.

    position: number of equal tokens before it.
    before: text of the last of them.
    earlier, prompt: text of either side from the difference on, control tokens included.
    earlier_token, prompt_token: the tokens that differ, as text.
    """

    position: int
    before: str
    earlier: str
    prompt: str
    earlier_token: str
    prompt_token: str

    def document(self) -> dict[str, object]:
        """Return a JSON document."""
        return asdict(self)


def first_difference(earlier: Sequence[int], prompt: Sequence[int], tokenizer: "Tokenizer") -> PrefixDifference | None:
    """Return the first difference between an earlier sequence and a prompt; None if one begins with the other."""
    position = common_prefix(earlier, prompt)
    if position == min(len(earlier), len(prompt)):
        return None

    def text(tokens: Sequence[int]) -> str:
        return tokenizer.decode(tokens, skip_special=False)

    tokens_before = prompt[max(0, position - _BEFORE) : position]
    before = text(tokens_before).rstrip("\ufffd")  # part of a character, which the next token may complete

    def text_after(side: Sequence[int]) -> str:
        # Decoded with the tokens before: alone, a token may lose its leading space or the rest of a character.
        return text([*tokens_before, *side[position : position + _AFTER]]).removeprefix(before)

    return PrefixDifference(
        position=position,
        before=before,
        earlier=text_after(earlier),
        prompt=text_after(prompt),
        earlier_token=text(earlier[position : position + 1]),
        prompt_token=text(prompt[position : position + 1]),
    )
