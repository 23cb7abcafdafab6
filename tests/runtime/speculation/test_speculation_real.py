"""The default model with and without speculation, bit for bit, alone and in a batch."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from headrace.models.loading.load import LoadedModel, load_model
from headrace.models.text.chat_prompt import ChatPrompt
from headrace.runtime.engine.engine import Engine
from headrace.runtime.engine.request import Event, Request, Step, TokenLogprobs
from headrace.runtime.ops import native
from headrace.runtime.sampling.params import SamplingParams
from tests.support.speculating import run, speculating
from tests.support.watched import split

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not native.status().available, reason="stock MLX promises tokens, not bits"),
]
SENTENCE = "The heron came through the lock on Monday with forty crates of apples and left with timber. "
ASKED = (
    f"Say this three times, word for word: {SENTENCE}",
    "List the numbers from one to twenty in words, each on a line of its own.",
    "Write a JSON list of five people with name, age and city.",
    "Why is the sky blue?",
)


@pytest.fixture(scope="module")
def loaded(default_model: Path) -> LoadedModel:
    return load_model(default_model, name="default", context=512)


def said(events: list[Event]) -> list[tuple[int, TokenLogprobs]]:
    steps = [event for event in events if isinstance(event, Step)]
    return [pair for step in steps for pair in zip(step.tokens, step.logprobs or (), strict=True)]


def test_speculation_leaves_the_default_models_output_unchanged(loaded: LoadedModel) -> None:
    prompts = [ChatPrompt(loaded.tokenizer).encode([{"role": "user", "content": text}]) for text in ASKED]
    drawn = SamplingParams(temperature=0.8, top_p=0.95, repetition_penalty=1.05, seed=4)
    requests = [
        Request(prompt, 40, drawn if number == 3 else SamplingParams(), loaded.tokenizer.eos_ids, logprobs=2)
        for number, prompt in enumerate(prompts)
    ]
    plain = Engine(loaded.network, context_limit=512)
    expected = run(plain, [replace(request, speculate="off") for request in requests])
    alone = [run(speculating(loaded.network, context_limit=512), [request])[0] for request in requests[:1]]
    for found in (run(speculating(loaded.network, context_limit=512), requests), alone):
        for ours, theirs in zip(found, expected, strict=False):
            assert said(ours) == said(theirs)
        assert sum(split(events)[1].summary.accepted for events in found) > 9


def test_a_model_as_its_own_draft_has_all_tokens_accepted(loaded: LoadedModel) -> None:
    prompt = ChatPrompt(loaded.tokenizer).encode([{"role": "user", "content": ASKED[3]}])
    request = Request(prompt, 32, SamplingParams(temperature=0.7, seed=9), speculate="draft")
    (events,) = run(speculating(loaded.network, context_limit=256, draft=loaded.network), [request])
    (expected,) = run(Engine(loaded.network, context_limit=256), [replace(request, speculate="off")])
    tokens, end = split(events)
    assert tokens == split(expected)[0]
    assert end.summary.accepted == end.summary.proposed > 0
