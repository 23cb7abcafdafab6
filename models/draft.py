"""A draft model beside the one that answers: both have to mean the same by every token."""

from headrace.models.load import LoadedModel, load_resolved
from headrace.models.registry.resolve import ResolvedModel
from headrace.models.text.tokenizer import Tokenizer
from headrace.runtime.errors import UsageError


def load_draft(resolved: ResolvedModel, model: LoadedModel) -> LoadedModel:
    """Load a draft for `model`. Raises what `load_resolved` raises, UsageError for another
    vocabulary or a network that cannot guess."""
    draft = load_resolved(resolved)
    if not draft.network.rolls_back:
        raise UsageError(f"{draft.name} cannot be a draft: its cache does not take back what was guessed wrong")
    check_same_vocabulary(model.tokenizer, draft.tokenizer, draft.name)
    return draft


def check_same_vocabulary(ours: Tokenizer, theirs: Tokenizer, name: str) -> None:
    """Token by token. Raises UsageError that names the first difference."""
    here, there = ours.vocabulary(), theirs.vocabulary()
    if here == there:
        return
    first = min(token for token in here.keys() | there.keys() if here.get(token) != there.get(token))
    raise UsageError(
        f"{name} cannot be a draft: token {first} is {there.get(first)!r} there and {here.get(first)!r} here",
        "a draft needs the very vocabulary of the model, as smaller models of one family have it",
    )
