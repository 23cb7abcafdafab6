"""Check whether a text adds control token ids to a prompt."""

from headrace.models.text.tokenizer import Tokenizer
from tests.support.tokenizer_kinds import CONTROLS

_ROLES = ("system", "user", "assistant")


class Smuggling:
    """A tokenizer of `tests.support.tokenizer_kinds` that texts are tried on."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        ids = (tokenizer._rust.token_to_id(text) for text in CONTROLS if text != "<unk>")
        self.controls = frozenset(index for index in ids if index is not None)  # whatever the vocabulary calls them
        self._harmless = self._written("y")

    def ways(self, text: str) -> list[str]:
        """In messages of each role, or as a raw prompt, it gives other control ids than a harmless text there."""
        found = [] if self._written(text) == self._harmless else ["chat"]
        return found if self.controls.isdisjoint(self._tokenizer.encode(text)) else [*found, "raw"]

    def _written(self, content: str) -> list[int]:
        chat = [*({"role": role, "content": content} for role in _ROLES), {"role": "user", "content": "x"}]
        return [index for index in self._tokenizer.encode_chat(chat) if index in self.controls]
