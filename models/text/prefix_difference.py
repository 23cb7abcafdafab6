"""The first token in which a prompt differs from an earlier sequence: the reason why its cached K/V end there."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from headrace.runtime.kv.common_prefix import common_prefix

if TYPE_CHECKING:
    from headrace.models.text.tokenizer import Tokenizer

_BEFORE = 12  # tokens of the text before a difference
_AFTER = 8  # and from it on


@dataclass(frozen=True, slots=True)
class PrefixDifference:
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
    at = common_prefix(earlier, prompt)
    if at == min(len(earlier), len(prompt)):
        return None

    def text(tokens: Sequence[int]) -> str:
        return tokenizer.decode(tokens, skip_special=False)

    before = prompt[max(0, at - _BEFORE) : at]
    lead = text(before).rstrip("\ufffd")  # part of a character
    sides = (text([*before, *side[at : at + _AFTER]]) for side in (earlier, prompt))
    rest_before, ahead = (side[len(lead) :] if side.startswith(lead) else side for side in sides)
    return PrefixDifference(at, lead, rest_before, ahead, text(earlier[at : at + 1]), text(prompt[at : at + 1]))
