"""Loading a draft model for speculative decoding, and its checks against the target model.

For `--draft`: `app.cli.load_for_answers`, the engine and benchmarks call `load_draft` after the model is loaded.

Guard: tests/models/loading/test_draft.py.
"""

from collections.abc import Sequence

from headrace.models.loading.load import LoadedModel, load_resolved
from headrace.models.registry.progress import Progress, silent
from headrace.models.registry.resolve import ResolvedModel
from headrace.models.text.tokenizer import Tokenizer
from headrace.runtime.errors import NotEnoughMemoryError, UsageError
from headrace.runtime.kv.backend import KVOptions
from headrace.runtime.machine import memory
from headrace.runtime.metrics.cost import LayerKV, held_bytes, longest_context
from headrace.runtime.metrics.units import format_bytes


def load_draft(resolved: ResolvedModel, model: LoadedModel, progress: Progress = silent) -> LoadedModel:
    """Load a draft model for `model`. progress: see `load_model`.

    Raises UsageError for another vocabulary or a network that cannot roll back, NotEnoughMemoryError if the K/V of
    both do not fit together, and what `load_resolved` raises.
    """
    draft = load_resolved(resolved, progress=progress)
    backend = draft.network.kv_backend(KVOptions(1))
    if not backend.rolls_back or backend.acquire(()).needs_marks:
        raise UsageError(f"{draft.name} cannot be a draft: its cache cannot roll back rejected tokens")
    check_same_vocabulary(model.tokenizer, draft.tokenizer, draft.name)
    check_memory([*model.network.cost.kv, *draft.network.cost.kv], model.context_limit, draft.name)
    return draft


def check_memory(kv: Sequence[LayerKV], tokens: int, name: str) -> None:
    """Raise NotEnoughMemoryError if the K/V of both models do not fit. kv: the layers of both; weights are loaded."""
    budget = memory.budget()
    if budget is None or (fitting := longest_context(kv, budget.usable, tokens)) >= tokens:
        return
    raise NotEnoughMemoryError(
        f"{name} cannot be a draft: together with the model's, the K/V of {tokens:,} tokens take "
        f"{format_bytes(held_bytes(kv, tokens))}, but {format_bytes(budget.usable)} may be used",
        f"a context of {fitting:,} tokens would fit: --context {fitting}",
    )


def check_same_vocabulary(target: Tokenizer, draft: Tokenizer, name: str) -> None:
    """Raise UsageError that names the first token in which the vocabularies differ."""
    wanted = target.vocabulary()
    draft_vocabulary = draft.vocabulary()
    if wanted == draft_vocabulary:
        return
    first = min(
        token for token in wanted.keys() | draft_vocabulary.keys() if wanted.get(token) != draft_vocabulary.get(token)
    )
    raise UsageError(
        f"{name} cannot be a draft: its token {first} is {draft_vocabulary.get(first)!r}, "
        f"the model's is {wanted.get(first)!r}",
        "a draft needs exactly the vocabulary of the model, as smaller models of one family have it",
    )
