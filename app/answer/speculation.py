"""What guesses tokens ahead: from what people choose to what a request says."""

from typing import cast

from headrace.runtime.speculation.proposer import Speculation


def speculation(choice: str | None, *, draft: bool = False) -> Speculation:
    """choice: one of `app.answer.options.SPECULATE`, None for no choice. draft: whether there is a draft model."""
    if choice == "off":
        return "off"
    return "draft" if draft else cast(Speculation, choice or "ngram")
