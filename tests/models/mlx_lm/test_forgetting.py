"""Conversations with architectures whose caches forget: said as without overlap and without reuse, and little re-read.

Recurrent state, windows and chunks, by themselves, beside ordinary layers and within them, as mlx-lm's classes have.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from headrace.models.mlx_lm.network import MlxLmNetwork
from headrace.runtime.engine.engine import Engine
from headrace.runtime.engine.prompt_chunks import OPENING
from headrace.runtime.engine.request import CancelFlag, Event, Finished, Request, Step
from tests.models.mlx_lm.test_costs import DEEPSEEK
from tests.models.mlx_lm.test_network import _BASE, CONFIGS, VOCAB, load, write
from tests.support.watched import WatchedNetwork, split, step_by_step

pytestmark = pytest.mark.peer

LIMIT = 256
WINDOW = 8
FIRST = [(7 * i * i + 3 * i + 5) % VOCAB for i in range(3 * WINDOW)]
SMALL: dict[str, Any] = {**_BASE, "hidden_size": 32, "intermediate_size": 48, "head_dim": 16, "num_key_value_heads": 2}
MAMBA2: dict[str, Any] = {
    "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_n_groups": 1,
    "mamba_conv_bias": True, "mamba_proj_bias": False,
}  # fmt: skip
FORGETFUL: dict[str, dict[str, Any]] = {
    "mamba": CONFIGS["mamba"],
    "gpt_oss": {**CONFIGS["gpt_oss"], "sliding_window": WINDOW},
    "mamba2": {
        "model_type": "mamba2", "num_heads": 4, "head_dim": 16, "vocab_size": VOCAB, "hidden_size": 32,
        "intermediate_size": 64, "state_size": 16, "num_hidden_layers": 3, "layer_norm_epsilon": 1e-5, "conv_kernel": 4,
        "n_groups": 1, "use_bias": False, "use_conv_bias": True, "tie_word_embeddings": False,
        "time_step_limit": [0.0, 100.0], "time_step_rank": 4,
    },
    "qwen3_next": {
        **SMALL, "model_type": "qwen3_next", "linear_num_value_heads": 4, "linear_num_key_heads": 2,
        "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4, "num_experts": 4,
        "num_experts_per_tok": 2, "decoder_sparse_step": 1, "shared_expert_intermediate_size": 32,
        "mlp_only_layers": [], "moe_intermediate_size": 32, "partial_rotary_factor": 0.25,
    },
    "lfm2": {
        **SMALL, "model_type": "lfm2", "num_attention_heads": 2, "norm_eps": 1e-5, "conv_bias": False,
        "conv_L_cache": 3, "block_dim": 32, "block_ff_dim": 48, "block_multiple_of": 16,
        "block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": False,
        "layer_types": ["conv", "full_attention", "conv", "conv"],
    },
    "granitemoehybrid": {
        **SMALL, **MAMBA2, "model_type": "granitemoehybrid", "attention_bias": False, "embedding_multiplier": 1.0,
        "attention_multiplier": 0.25, "logits_scaling": 1.0, "residual_multiplier": 1.0,
        "position_embedding_type": "nope", "layer_types": ["mamba", "mamba", "attention", "mamba"],
        "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 48,
    },
    "falcon_h1": {  # a state and ordinary entries in each layer
        **SMALL, **MAMBA2, "model_type": "falcon_h1", "mamba_d_ssm": 64, "mamba_expand": 2, "mamba_chunk_size": 256,
        "mamba_norm_before_gate": True, "mamba_rms_norm": False, "mamba_use_mlp": True, "mlp_bias": False,
        "projectors_bias": False, "attention_bias": False, "mlp_multipliers": [1.0, 1.0],
        "ssm_multipliers": [1.0] * 5, "attention_in_multiplier": 1.0, "attention_out_multiplier": 1.0,
        "embedding_multiplier": 1.0, "key_multiplier": 1.0, "lm_head_multiplier": 1.0, "ssm_in_multiplier": 1.0,
        "ssm_out_multiplier": 1.0, "tie_word_embeddings": False,
    },
    "baichuan_m1": {  # a state and a window in one layer
        **SMALL, "model_type": "baichuan_m1", "sliding_window": WINDOW, "sliding_window_layers": [1, 3],
        "conv_window": 2,
    },
    "gemma3_text": {
        **SMALL, "model_type": "gemma3_text", "sliding_window": WINDOW, "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 16,
    },
    "llama4": {  # attends within chunks
        "model_type": "llama4",
        "text_config": {
            **SMALL, "model_type": "llama4_text", "attention_bias": False, "attention_chunk_size": WINDOW,
            "interleave_moe_layer_step": 2, "intermediate_size_mlp": 48, "num_experts_per_tok": 1,
            "num_local_experts": 4, "rope_scaling": None, "use_qk_norm": True,
        },
    },
    "recurrent_gemma": {
        **SMALL, "model_type": "recurrent_gemma", "attention_bias": False, "conv1d_width": 4, "logits_soft_cap": 30.0,
        "attention_window_size": WINDOW, "block_types": ["recurrent", "recurrent", "attention"], "num_hidden_layers": 3,
    },
}  # fmt: skip
KINDS = ["mamba", "gpt_oss", "falcon_h1", "llama4"]  # a state, a window, a state beside entries, chunks


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], MlxLmNetwork]:
    return cache(lambda name: load(write(tmp_path_factory.mktemp("forgetful"), FORGETFUL[name])))


@pytest.fixture(scope="module", params=FORGETFUL)
def network(request: pytest.FixtureRequest, made: Callable[[str], MlxLmNetwork]) -> MlxLmNetwork:
    return made(request.param)


@pytest.fixture(scope="module", params=KINDS)
def one_of_its_kind(request: pytest.FixtureRequest, made: Callable[[str], MlxLmNetwork]) -> MlxLmNetwork:
    return made(request.param)


@cache
def answers(network: MlxLmNetwork) -> dict[tuple[int, ...], list[int]]:  # noqa: ARG001
    """As far as `alone` had to find them."""
    return {}


def alone(network: MlxLmNetwork, prompt: tuple[int, ...], steps: int) -> list[int]:
    """The greedy answer without overlap and without reuse; many turns begin alike."""
    known = answers(network)
    if len(known.get(prompt, [])) < steps:
        known[prompt] = step_by_step(network, prompt, max(steps, 2 * WINDOW if prompt == tuple(FIRST) else 0))[0]
    return known[prompt][:steps]


def end_by_length(engine: Engine, prompt: list[int]) -> Iterator[Event]:
    return engine.generate(Request(prompt, speculate="off", max_tokens=2 * WINDOW))


def end_by_stop_token(engine: Engine, prompt: list[int]) -> Iterator[Event]:
    said = alone(engine.network._network, tuple(prompt), WINDOW)  # type: ignore[attr-defined]
    newest = max(said.index(token) for token in said)  # greedy answers of random weights repeat themselves
    return engine.generate(Request(prompt, speculate="off", stop_ids=frozenset([said[newest]])))


def end_by_cancel(engine: Engine, prompt: list[int]) -> Iterator[Event]:
    cancel = CancelFlag()
    for event in engine.generate(Request(prompt, speculate="off", cancel=cancel)):
        if isinstance(event, Step) and event.record.index == WINDOW:
            cancel.set()
        yield event


def end_by_closing(engine: Engine, prompt: list[int]) -> Iterator[Event]:
    """As a stop string does."""
    events = engine.generate(Request(prompt, speculate="off"))
    for event in events:
        yield event
        if isinstance(event, Step) and event.record.index == WINDOW:
            events.close()  # type: ignore[attr-defined]


@dataclass
class Chat:
    """Turns that are all held to decode without overlap and without reuse; says how much of each prompt was re-read."""

    network: Any

    def __post_init__(self) -> None:
        self.watched = WatchedNetwork(self.network)
        self.engine = Engine(self.watched, context_limit=LIMIT, keep_prefix=True)

    def ask(self, prompt: list[int], end: Any = end_by_length) -> tuple[list[int], int]:
        """(the answer with its stop token, how many tokens of the prompt were not in the cache)."""
        fed = len(self.watched.fed)
        positions = len(self.watched.positions)
        events = list(end(self.engine, prompt))
        said = [token for event in events if isinstance(event, Step) for token in event.tokens]
        if isinstance(events[-1], Finished) and events[-1].stop_id is not None:
            said.append(events[-1].stop_id)
        assert said == alone(self.network, tuple(prompt), len(said))
        passes = [batch[0].tolist() for batch in self.watched.fed[fed:]]
        first = self.watched.positions[positions][0]
        tokens = [token for batch in passes for token in batch]
        assert tokens[: len(prompt) - first] == prompt[first:]
        assert tokens[len(prompt) - first :] in (said, said[:-1])  # each token once, in order
        ahead = [length - committed for length, committed in self.watched.positions[positions:]]
        assert set(ahead[len(ahead) - len(said) + 1 :]) <= {1}  # also long past the window
        return said, len(prompt) - first


@pytest.mark.sampled
@pytest.mark.parametrize("end", [end_by_length, end_by_stop_token, end_by_cancel, end_by_closing])
def test_the_next_turn_prefills_new_tokens_only(one_of_its_kind: MlxLmNetwork, end: Any) -> None:
    chat = Chat(one_of_its_kind)
    said, read = chat.ask(FIRST, end)
    assert read == len(FIRST)
    question = [1, 2, 3, 4]
    assert chat.ask([*FIRST, *said, *question], end)[1] == len(question) + (end is end_by_length)


def test_a_cache_with_pooled_entries_is_reused_by_the_next_turn(tmp_path: Path) -> None:
    """A window beside entries that stand for several tokens each. Once only: a step of it has many operations."""
    chat = Chat(load(write(tmp_path, {**DEEPSEEK, "vocab_size": VOCAB, "sliding_window": WINDOW})))
    said, _ = chat.ask(FIRST, end_by_cancel)
    assert chat.ask([*FIRST, *said, 9], end_by_cancel)[1] <= 2
    assert chat.ask([*FIRST, *said[:-2], 9, 9], end_by_cancel)[1] <= len(said) + OPENING


@pytest.mark.sampled
def test_an_edited_turn_is_prefilled_from_the_nearest_mark(network: MlxLmNetwork) -> None:
    chat = Chat(network)
    said, _ = chat.ask(FIRST)
    second = [*FIRST, *said, *FIRST[:24]]
    chat.ask(second)
    edited = [*FIRST, *said, 9, *FIRST[:20]]
    assert chat.ask(edited)[1] == 22  # the message, and the last token of the answer before it
    assert chat.ask(edited)[1] <= OPENING + 1  # said anew
    assert chat.ask([*FIRST[:-3], 9, 9, 9, 9])[1] <= OPENING + 2  # the first turn


@pytest.mark.sampled
def test_a_turn_without_its_thinking_is_prefilled_from_its_prompts_end(one_of_its_kind: MlxLmNetwork) -> None:
    chat = Chat(one_of_its_kind)
    opening = [90, 91]
    thought = [80, 81, 82]
    said, _ = chat.ask([*FIRST, *opening, *thought])
    answer = said[5:]
    prompt = [*FIRST, *opening, *answer, *FIRST[:7]]
    read = chat.ask(prompt)[1]
    assert read <= len(prompt) - len(FIRST) + OPENING


@pytest.mark.sampled
def test_after_an_error_the_conversation_is_prefilled_anew(one_of_its_kind: MlxLmNetwork) -> None:
    chat = Chat(one_of_its_kind)
    said, _ = chat.ask(FIRST)
    at = len(chat.watched.fed) + 5

    def explode(number: int) -> None:
        if number == at:
            raise RuntimeError("device lost")

    chat.watched._on_pass = explode
    prompt = [*FIRST, *said, 1, 2, 3]
    with pytest.raises(RuntimeError, match="device lost"):
        list(chat.engine.generate(Request(prompt, speculate="off", max_tokens=WINDOW)))
    chat.watched.fed.pop() if len(chat.watched.fed) > at else None
    chat.watched._on_pass = lambda _: None
    assert chat.ask(prompt)[1] == len(prompt)


@pytest.mark.sampled
def test_prefetch_leaves_output_unchanged_and_is_reused(one_of_its_kind: MlxLmNetwork) -> None:
    chat = Chat(one_of_its_kind)
    said, _ = chat.ask(FIRST)
    draft = [*FIRST, *said, *FIRST[:20]]
    for typed in (draft[:-8], draft[:-2], draft):
        chat.engine.prefetch(typed, lambda: False)
    assert chat.ask([*draft[:-1], 3, 4])[1] <= OPENING + 3
    assert chat.ask([*FIRST, *said, 5, 6])[1] <= OPENING + 3


@pytest.mark.sampled
def test_cached_bytes_are_counted_and_bounded(network: MlxLmNetwork) -> None:
    engine = Engine(network, context_limit=LIMIT, keep_prefix=True)
    alone = Engine(network, context_limit=LIMIT)
    prompt = list(FIRST)
    for _ in range(3):
        said, _ = split(list(engine.generate(Request(prompt, speculate="off", max_tokens=8))))
        prompt += [*said, 4, 5]
    kept: Any = engine.kv.acquire([*prompt, 1])
    live = next(
        event for event in alone.generate(Request(prompt, speculate="off", max_tokens=1)) if isinstance(event, Step)
    )
    state = kept.allocated_bytes - sum(int(part.nbytes) for part in kept.parts)
    assert 0 < state <= 6 * 3 * max(live.record.kv_allocated_bytes, 1)
