"""Token ids and texts equal transformers': for the default model's own files, and for small ones of each family."""

import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.models.text.template_rules import TemplateRules
from headrace.models.text.template_text import TemplateText
from headrace.models.text.tokenizer import Tokenizer
from tests.support.corpus import NASTY
from tests.support.families import FAMILIES, write_family

pytestmark = pytest.mark.peer

Pair = tuple[Tokenizer, Any]  # ours and transformers'


def load_both(directory: Path) -> Pair:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers' own deprecations, and its remark that there is no torch
        transformers = pytest.importorskip("transformers")
        transformers.utils.logging.set_verbosity_error()
        return Tokenizer.load(directory), transformers.AutoTokenizer.from_pretrained(directory)


@cache
def family_pair(family: str) -> Pair:
    with TemporaryDirectory() as directory:
        return load_both(write_family(Path(directory), family))


@pytest.fixture(params=[*FAMILIES, pytest.param("default", marks=pytest.mark.real)])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    if request.param == "default":
        yield load_both(request.getfixturevalue("default_model"))
    else:
        yield family_pair(request.param)


def ordinary(ours: Tokenizer) -> list[str]:
    """The corpus without texts that hold a control token: there we differ on purpose."""
    return [text for text in NASTY if not ours._controls.find(TemplateText(text))]


def expected_chat(theirs: Any, chat: list[dict[str, Any]], **options: Any) -> list[int]:
    ids: list[int] = theirs.apply_chat_template(
        chat, **{"tokenize": True, "return_dict": False, "add_generation_prompt": True, **options}
    )
    return ids


@pytest.mark.sampled
def test_texts_have_the_ids_of_transformers(pair: Pair) -> None:
    ours, theirs = pair
    for text in ordinary(ours):
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False), text
    for text in NASTY:
        assert ours.encode(text, special=True) == theirs.encode(text, add_special_tokens=False), text


@pytest.mark.sampled(3)
def test_raw_prompts_have_the_ids_of_transformers(pair: Pair) -> None:
    ours, theirs = pair
    for text in ordinary(ours):
        assert ours.encode_prompt(text) == theirs.encode(text), text


@pytest.mark.sampled
def test_chats_have_the_ids_of_transformers(pair: Pair) -> None:
    ours, theirs = pair
    for text in ordinary(ours):
        chat = [
            {"role": "user", "content": text},
            {"role": "assistant", "content": f"{text} {text}"},
            {"role": "user", "content": f"And then? {text}"},
        ]
        assert ours.encode_chat(chat) == expected_chat(theirs, chat), text
        expected = expected_chat(theirs, chat[:2], add_generation_prompt=False)
        assert ours.encode_chat(chat[:2], add_generation_prompt=False) == expected, text


@pytest.mark.sampled(3)
def test_chats_with_a_system_message_have_the_ids_of_transformers(pair: Pair) -> None:
    ours, theirs = pair
    assert ours.chat_template is not None
    if not TemplateRules(ours.chat_template).takes_system:
        pytest.skip("the template has no place for a system message")
    for text in ordinary(ours):
        if not text.strip():
            continue
        chat = [{"role": "system", "content": text}, {"role": "user", "content": "Go on."}]
        assert ours.encode_chat(chat) == expected_chat(theirs, chat), text


@pytest.mark.sampled
def test_decoded_and_streamed_texts_are_those_of_transformers(pair: Pair) -> None:
    ours, theirs = pair
    for text in NASTY:
        for ids in (ours.encode(text), ours.encode(text, special=True)[::-1]):
            assert ours.decode(ids, skip_special=False) == theirs.decode(ids, skip_special_tokens=False)
            text_of_all = theirs.decode(ids, skip_special_tokens=True)
            assert ours.decode(ids) == text_of_all
            stream = ours.detokenizer()
            assert "".join(map(stream.add, ids)) + stream.finish() == text_of_all


@pytest.mark.sampled
@pytest.mark.parametrize("family", FAMILIES)
@given(texts=st.lists(st.text(max_size=12), min_size=1, max_size=3))
def test_generated_chats_have_the_ids_of_transformers(family: str, texts: list[str]) -> None:
    ours, theirs = family_pair(family)
    chat = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    if not any(ours._controls.find(TemplateText(text)) for text in texts):
        assert ours.encode_chat(chat) == expected_chat(theirs, chat)


def test_prompts_with_tools_and_thinking_have_the_ids_of_transformers() -> None:
    ours, theirs = family_pair("qwen3")
    tools = [
        {
            "type": "function",
            "function": {"name": "time", "description": "<b>now</b> & é", "parameters": {"type": "object"}},
        }
    ]
    call = {"type": "function", "function": {"name": "time", "arguments": {"zone": "<UTC>"}}}
    chat = [
        {"role": "system", "content": "Be exact."},
        {"role": "user", "content": "What time is it?"},
        {"role": "assistant", "content": "<think>\nask\n</think>\n\nOne moment.", "tool_calls": [call]},
        {"role": "tool", "content": '{"time": "12:00"}'},
    ]
    assert ours.encode_chat(chat, tools=tools) == expected_chat(theirs, chat, tools=tools)
    assert ours.encode_chat(chat[:2], enable_thinking=False) == expected_chat(theirs, chat[:2], enable_thinking=False)


def test_eos_and_vocabulary_size_are_those_of_transformers(pair: Pair) -> None:
    ours, theirs = pair
    assert theirs.eos_token_id in ours.eos_ids
    assert ours.vocab_size == len(theirs)
