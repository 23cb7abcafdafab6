"""Prompts with the beginning of an answer, and thinking that the template opens itself."""

import json
from pathlib import Path

import pytest

from headrace.models.text.chat_prompt import ChatPrompt
from headrace.models.text.thinking import read_tags
from headrace.models.text.tokenizer import Tokenizer
from headrace.runtime.errors import UsageError
from headrace.runtime.sampling.section_limit import SectionLimit
from tests.support.families import FAMILIES, write_family

ASK = [{"role": "user", "content": "What is <think> for?"}]


def tokenizer(directory: Path, family: str, opens: bool = False) -> Tokenizer:
    write_family(directory / family, family)
    if opens:
        template = directory / family / "chat_template.jinja"
        template.write_text(template.read_text() + "{% if add_generation_prompt %}{{- '<think>\\n' }}{% endif %}")
    return Tokenizer.load(directory / family)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_continued_answer_follows_the_prompt(tmp_path: Path, family: str) -> None:
    encoder = tokenizer(tmp_path, family)
    prompts = ChatPrompt(encoder)
    prompt = prompts.encode(ASK)
    text = "It marks thinking. <|im_end|> It"
    continued = prompts.encode(ASK, read_tags(text))
    assert prompt == encoder.encode_chat(ASK)
    assert continued[: len(prompt)] == prompt
    assert encoder.decode(continued[len(prompt) :], skip_special=False).strip() == text
    assert encoder.eos_ids.isdisjoint(continued[len(prompt) :])  # the answer's text ends no turn


def test_a_continued_answer_has_the_models_thinking_tags(tmp_path: Path) -> None:
    encoder = tokenizer(tmp_path, "qwen3")
    prompts = ChatPrompt(encoder)
    assert prompts.thinks
    tags = encoder.encode("<think></think>", special=True)
    continued = prompts.encode(ASK, read_tags("<think>\nhm\n</think>\n\nFor"))[len(prompts.encode(ASK)) :]
    assert [token for token in continued if token in tags] == tags
    assert prompts.opening(prompts.encode(ASK)) == ""


def test_an_opening_tag_that_the_template_writes_belongs_to_the_answer(tmp_path: Path) -> None:
    prompts = ChatPrompt(tokenizer(tmp_path, "qwen3", opens=True))
    prompt = prompts.encode(ASK)
    assert prompts.opening(prompt) == "<think>\n"
    assert prompts.encode(ASK, read_tags("<think>\n")) == prompt  # not written twice
    longer = prompts.encode(ASK, read_tags("<think>\nhm"))
    assert longer[: len(prompt)] == prompt
    assert len(longer) > len(prompt)


def test_a_template_gets_enable_thinking(tmp_path: Path) -> None:
    encoder = tokenizer(tmp_path, "qwen3")
    prompts = ChatPrompt(encoder)
    asked = prompts.encode(ASK)
    assert prompts.encode(ASK, thinking=True) == asked
    told = prompts.encode(ASK, thinking=False)
    assert told == asked + encoder.encode("<think>\n\n</think>\n\n", special=True)
    assert prompts.encode(ASK, read_tags("It is"), thinking=False) == told + encoder.encode("It is")
    assert prompts.opening(told) == ""


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"qwen3"}))
def test_templates_without_a_thinking_switch_ignore_it(tmp_path: Path, family: str) -> None:
    prompts = ChatPrompt(tokenizer(tmp_path, family))
    assert prompts.encode(ASK, thinking=False) == prompts.encode(ASK, thinking=True) == prompts.encode(ASK)


def test_a_template_without_thinking_begins_no_section(tmp_path: Path) -> None:
    prompts = ChatPrompt(tokenizer(tmp_path, "chatml"))
    assert not prompts.thinks
    assert prompts.opening(prompts.encode([{"role": "user", "content": "<think>"}])) == ""


_PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{# </think> #}"
_FIELD = (
    "{% for m in messages %}{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m.content }}"
    "{% endfor %}{# </think> #}"
)


@pytest.mark.parametrize(
    ("template", "earlier"), [(_PLAIN, "[user]2+2?[assistant]Four.[user]Sure?"), (_FIELD, "2+2?(Hm.)Four.Sure?")]
)
def test_earlier_thinking_is_where_the_template_looks_for_it(tmp_path: Path, template: str, earlier: str) -> None:
    """Templates read `reasoning_content`, or leave earlier thinking out (SmolLM3, Granite 3.3, DeepSeek V3.2)."""
    encoder = tokenizer(tmp_path, "qwen3")
    (tmp_path / "qwen3" / "chat_template.jinja").write_text(template)
    prompts = ChatPrompt(Tokenizer.load(tmp_path / "qwen3"))
    turns = [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nFour."},
        {"role": "user", "content": "Sure?"},
    ]
    assert encoder.decode(prompts.encode(turns), skip_special=False) == earlier
    turns[1] = {"role": "assistant", "content": "Four.", "reasoning_content": "Hm."}  # as a client sends it
    assert encoder.decode(prompts.encode(turns), skip_special=False) == earlier


def test_an_answer_of_a_model_without_thinking_is_not_split(tmp_path: Path) -> None:
    encoder = tokenizer(tmp_path, "chatml")
    said = "<think>\nis a tag\n</think>\n\nof some models."
    prompt = ChatPrompt(encoder).encode([*ASK, {"role": "assistant", "content": said}, *ASK])
    assert said in encoder.decode(prompt)


@pytest.mark.parametrize(
    ("written", "on", "off"),
    [
        ("{{ thinking }}", "True", "False"),
        ("{{ thinking_mode }}", "enabled", "disabled"),
        ("{{ thinking_option }}", "on", "off"),
        ("{{ thinking_budget }}", "-1", "0"),
        ("{{ reasoning_effort }}{# one of 'none', 'high' #}", "", "none"),
        ("{{ reasoning_effort }}", "", ""),
        ("{{ rethinking }}", "", ""),
    ],
)
def test_thinking_is_switched_by_each_templates_variable(tmp_path: Path, written: str, on: str, off: str) -> None:
    encoder = tokenizer(tmp_path, "qwen3")
    (tmp_path / "qwen3" / "chat_template.jinja").write_text(written + "{# </think> #}.")
    prompts = ChatPrompt(Tokenizer.load(tmp_path / "qwen3"))
    rendered = [encoder.decode(prompts.encode(ASK, thinking=thinking)) for thinking in (True, False, None)]
    assert rendered == [f"{on}.", f"{off}.", "."]


@pytest.mark.parametrize(
    ("written", "level", "budget"),
    [
        ("{{ reasoning_effort }}", "high.", "."),
        ("{{ thinking_effort }}", "high.", "."),
        ("{{ enable_thinking }}{{ reasoning_effort }}", "Truehigh.", "True."),
        ("{{ thinking_budget }}", "-1.", "300."),
        ("{{ thinking_mode }}", "enabled.", "enabled."),
        ("", ".", "."),
    ],
)
def test_levels_and_budgets_are_set_by_each_templates_variables(
    tmp_path: Path, written: str, level: str, budget: str
) -> None:
    encoder = tokenizer(tmp_path, "qwen3")
    (tmp_path / "qwen3" / "chat_template.jinja").write_text(written + "{# </think> #}.")
    prompts = ChatPrompt(Tokenizer.load(tmp_path / "qwen3"))
    assert encoder.decode(prompts.encode(ASK, thinking=300)) == budget
    assert encoder.decode(prompts.encode(ASK, thinking="high")) == level


def test_a_level_that_a_template_refuses_becomes_the_nearest(tmp_path: Path) -> None:
    """Hunyuan's has no medium; a template's own name of a level counts, too."""
    encoder = tokenizer(tmp_path, "qwen3")
    check = "{% if reasoning_effort is defined and reasoning_effort not in ['no_think', 'low', 'high'] %}"
    written = check + "{{ raise_exception('levels') }}{% endif %}{{ reasoning_effort }}{# </think> #}."
    (tmp_path / "qwen3" / "chat_template.jinja").write_text(written)
    prompts = ChatPrompt(Tokenizer.load(tmp_path / "qwen3"))
    rendered = [encoder.decode(prompts.encode(ASK, thinking=level)) for level in ("low", "medium", "high")]
    assert rendered == ["low.", "low.", "high."]


def test_variables_of_the_template_are_given_and_unknown_ones_refused(tmp_path: Path) -> None:
    encoder = tokenizer(tmp_path, "qwen3")
    (tmp_path / "qwen3" / "chat_template.jinja").write_text("{{ mood }}{{ preserve_thinking }}{{ messages[0].role }}")
    prompts = ChatPrompt(Tokenizer.load(tmp_path / "qwen3"))
    assert encoder.decode(prompts.encode(ASK, variables={"mood": "glad", "preserve_thinking": True})) == "gladTrueuser"
    assert encoder.decode(prompts.encode(ASK, variables={"enable_thinking": False})) == "user"  # a hint
    with pytest.raises(UsageError, match=r"chat_template_kwargs\.food: .* no such variable") as caught:
        prompts.encode(ASK, variables={"food": 1})
    assert caught.value.hint == "it reads: mood, preserve_thinking"
    with pytest.raises(UsageError, match="messages"):
        prompts.encode(ASK, variables={"messages": []})


def test_a_budget_needs_a_thinking_section(tmp_path: Path) -> None:
    prompts = ChatPrompt(tokenizer(tmp_path, "chatml"))
    for thinking in (300, "low"):
        with pytest.raises(UsageError, match=f"thinking {thinking}: "):
            prompts.encode(ASK, thinking=thinking)


def test_a_budget_limits_the_section(tmp_path: Path) -> None:
    encoder = tokenizer(tmp_path, "qwen3")
    prompts = ChatPrompt(encoder)
    opening, closing = (tuple(encoder.encode(tag, special=True)) for tag in ("<think>", "</think>"))
    assert prompts.section_limit(9, is_open=False) == SectionLimit(9, opening, closing)
    assert prompts.section_limit(9, is_open=True) == SectionLimit(9, (), closing)
    for thinking in (True, False, None, "low"):
        assert prompts.section_limit(thinking, is_open=True) is None


_TURNS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As real templates rework answers: Qwen 3, Gemma 4, GPT-OSS, Reka Edge; SmolLM3 shows no calls.
_REWORKING = {
    "cut after thinking": _TURNS.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] }}"),
    "cut at a control token": _TURNS.replace("{{ m.content }}", "{{ m.content.split('<|im_end|>')[0] }}"),
    "control tokens refused": "{% for m in messages if '<|im_end|>' in m.content and m.role == 'assistant' %}"
    "{{ raise_exception('tags') }}{% endfor %}" + _TURNS,
    "written as ASCII": _TURNS.replace("| tojson", "| tojson(ensure_ascii=True)"),
    "no calls": _TURNS.replace("m.tool_calls or []", "[]"),
}


@pytest.mark.parametrize("mark", ["<|im_end|>", "</think>", "<think>"])
@pytest.mark.parametrize("template", _REWORKING)
def test_control_tokens_that_an_answer_spells_are_text(tmp_path: Path, template: str, mark: str) -> None:
    """An answer, thinking and the arguments of a call keep the words, which become no control tokens."""
    encoder = tokenizer(tmp_path, "qwen3")
    thinks = "{% if enable_thinking is false %}<think>\n\n</think>{% endif %}"
    (tmp_path / "qwen3" / "chat_template.jinja").write_text(_REWORKING[template] + thinks)
    encoder = Tokenizer.load(tmp_path / "qwen3")
    controls = set(encoder.encode("<|im_start|><|im_end|><think></think><tool_call></tool_call>", special=True))

    def prompt(text: str) -> list[int]:
        arguments = json.dumps({"path": text, text: [text]})
        call = {"id": "a", "type": "function", "function": {"name": "look", "arguments": arguments}}
        return ChatPrompt(encoder).encode(
            [
                *ASK,
                {"role": "assistant", "content": text, "reasoning_content": text},
                *ASK,
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "a", "content": "found"},
            ]
        )

    harmless = prompt("It ends here.")
    spelt = prompt(f"It {mark} ends here.")
    assert encoder.decode(spelt).count(f"It {mark} ends here.") == encoder.decode(harmless).count("It ends here.") == 4
    assert [token for token in spelt if token in controls] == [token for token in harmless if token in controls]
