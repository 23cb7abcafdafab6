"""Small tokenizers in the style of each model family, trained on the spot, with chat templates.

They cover the differences between families: byte-level or SentencePiece, normalizers, special and plain added tokens,
tokens that swallow spaces, BOS, and templates that refuse or fold system messages.
"""

import json
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from tests.support.corpus import NASTY

_CHATML = """\
{%- for message in messages %}
{%- if loop.first and message['role'] != 'system' %}
{{- '<|im_start|>system\\nYou answer briefly.<|im_end|>\\n' }}
{%- endif %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

_QWEN3 = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- 'You may call these:\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' ~ (tool | tojson) }}{%- endfor %}
    {{- '\\n</tools>\\nCall with <tool_call>\\n{...}\\n</tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last_query=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = messages|length - 1 - loop.index0 %}
    {%- if message.role == 'user' and not message.content.startswith('<tool_response>') %}
        {%- set ns.last_query = index %}
        {%- break %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set content, thought = message.content, '' %}
        {%- if '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last_query %}{{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}{%- endif %}
        {{- content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n' ~ (call.function | tojson) ~ '\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""

_LLAMA3 = """\
{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""

_GEMMA2 = """\
{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant/...') }}
{% endif %}
{{ '<start_of_turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '
' + message['content'] | trim + '<end_of_turn>
' }}{% endfor %}
{% if add_generation_prompt %}{{ '<start_of_turn>model
' }}{% endif %}"""

_GEMMA3 = """\
{{ bos_token }}
{%- set prefix = '' %}{%- set turns = messages %}
{%- if messages[0]['role'] == 'system' %}
    {%- set prefix = (messages[0]['content'] if messages[0]['content'] is string
                      else messages[0]['content'][0]['text']) + '\\n\\n' %}
    {%- set turns = messages[1:] %}
{%- endif %}
{%- for message in turns %}
    {{- '<start_of_turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\\n' }}
    {{- prefix if loop.first else '' }}
    {%- if message['content'] is string %}{{- message['content'] | trim }}
    {%- else %}{%- for part in message['content'] %}{{- part['text'] | trim }}{%- endfor %}{%- endif %}
    {{- '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}"""

_MISTRAL = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}{{- '[INST] ' + message['content'] + ' [/INST]' }}
    {%- elif message['role'] == 'assistant' %}{{- ' ' + message['content'] + eos_token }}
    {%- endif %}
{%- endfor %}"""

_PHI = """\
{% for message in messages %}{{ '<|' + message['role'] + '|>\\n' + message['content'] + '<|end|>\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"""

_GPT_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLIT = {"type": "Split", "pattern": {"Regex": _GPT_SPLIT}, "behavior": "Isolated", "invert": False}
_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
_FALLBACK = [
    {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
]
_TO_METASPACE = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}


@dataclass(frozen=True)
class Family:
    """Files of a model directory. `special`: declared special tokens; `plain`: other added tokens."""

    template: str
    special: tuple[str, ...]
    config: dict[str, Any]
    plain: tuple[str, ...] = ()
    byte_level: bool = True
    sections: dict[str, Any] = field(default_factory=dict)  # of tokenizer.json
    flags: dict[str, bool] = field(default_factory=dict)  # of the special added tokens
    places_system: bool = True


FAMILIES: dict[str, Family] = {
    "chatml": Family(
        _CHATML,
        ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"},
        sections={
            "pre_tokenizer": {
                "type": "Sequence",
                "pretokenizers": [{"type": "Digits", "individual_digits": True}, {**_BYTES, "use_regex": True}],
            }
        },
    ),
    "qwen3": Family(
        _QWEN3,
        ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        {"bos_token": None, "eos_token": "<|im_end|>", "add_bos_token": False},
        plain=("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
        sections={
            "normalizer": {"type": "NFC"},
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [_SPLIT, _BYTES]},
        },
    ),
    "llama3": Family(
        _LLAMA3,
        ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"},
        sections={"pre_tokenizer": {"type": "Sequence", "pretokenizers": [_SPLIT, _BYTES]}},
    ),
    "gemma2": Family(
        _GEMMA2,
        ("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"),
        {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<pad>"},
        plain=("\n\n", "\n\n\n", "▁▁", "▁▁▁▁", "<table>", "<h1>"),
        byte_level=False,
        sections={
            "normalizer": _TO_METASPACE,
            "pre_tokenizer": {
                "type": "Split",
                "pattern": {"String": " "},
                "behavior": "MergedWithPrevious",
                "invert": False,
            },
            "decoder": {"type": "Sequence", "decoders": _FALLBACK},
        },
        places_system=False,
    ),
    "gemma3": Family(
        _GEMMA3,
        ("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"),
        {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<pad>"},
        plain=("\n\n", "\n\n\n", "▁▁"),
        byte_level=False,
        sections={"normalizer": _TO_METASPACE, "decoder": {"type": "Sequence", "decoders": _FALLBACK}},
    ),
    "mistral": Family(
        _MISTRAL,
        ("<unk>", "<s>", "</s>", "[INST]", "[/INST]"),
        {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
        byte_level=False,
        sections={
            "pre_tokenizer": {
                "type": "Metaspace",
                "replacement": "▁",
                "prepend_scheme": "first",
                "split": False,
            },
            "decoder": {
                "type": "Sequence",
                "decoders": [*_FALLBACK, {"type": "Strip", "content": " ", "start": 1, "stop": 0}],
            },
        },
        places_system=False,
    ),
    "phi": Family(
        _PHI,
        ("<unk>", "<s>", "</s>", "<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
        {"bos_token": "<s>", "eos_token": "<|endoftext|>", "unk_token": "<unk>"},
        byte_level=False,
        sections={
            "normalizer": {
                "type": "Sequence",
                "normalizers": [{"type": "Prepend", "prepend": "▁"}, _TO_METASPACE],
            },
            "decoder": {
                "type": "Sequence",
                "decoders": [*_FALLBACK, {"type": "Strip", "content": " ", "start": 1, "stop": 0}],
            },
        },
        flags={"rstrip": True},
    ),
    "metaspace": Family(
        _MISTRAL,
        ("<unk>", "<s>", "</s>", "[INST]", "[/INST]"),
        {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
        byte_level=False,
        sections={
            "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
            "decoder": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
        },
        places_system=False,
    ),
}


def write_family(directory: Path, name: str) -> Path:
    """Write tokenizer.json, tokenizer_config.json, chat_template.jinja and config.json of a family."""
    family = FAMILIES[name]
    directory.mkdir(parents=True, exist_ok=True)
    document = _document(name)
    ids = {added["content"]: added["id"] for added in document["added_tokens"]}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 4096, **family.config}
    config["clean_up_tokenization_spaces"] = False
    (directory / "tokenizer.json").write_text(json.dumps(document), encoding="utf-8")
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "chat_template.jinja").write_text(family.template, encoding="utf-8")
    (directory / "config.json").write_text(
        json.dumps({"model_type": "llama", "eos_token_id": ids[family.config["eos_token"]]})
    )
    return directory


@cache
def _document(name: str) -> dict[str, Any]:
    """Return a tokenizer.json: a BPE of a few hundred merges, learned from the corpus."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    family = FAMILIES[name]
    rust = Tokenizer(models.BPE())
    alphabet = pre_tokenizers.ByteLevel.alphabet() if family.byte_level else []
    rust.pre_tokenizer = (
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        if family.byte_level
        else pre_tokenizers.Metaspace()
    )
    # A small alphabet leaves characters to the byte tokens of SentencePiece vocabularies.
    limit = {} if family.byte_level else {"limit_alphabet": 120}
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        initial_alphabet=alphabet,
        special_tokens=list(family.special),
        show_progress=False,
        **limit,
    )
    rust.train_from_iterator(NASTY, trainer)
    document: dict[str, Any] = json.loads(rust.to_str())
    document["decoder"] = _BYTES
    document.update(family.sections)
    for section in ("normalizer", "pre_tokenizer"):
        document[section] = family.sections.get(section)
    model = document["model"]
    if not family.byte_level:
        for byte in range(256):
            model["vocab"].setdefault(f"<0x{byte:02X}>", len(model["vocab"]))
        model.update(byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    if name == "llama3":
        model["ignore_merges"] = True
    for added in document["added_tokens"]:
        added.update(family.flags)
    size = len(model["vocab"])
    for index, text in enumerate(family.plain):
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        document["added_tokens"].append({"id": size + index, "content": text, "special": False, **flags})
    document["post_processor"] = _bos_processor(family, model["vocab"])
    return document


def _bos_processor(family: Family, vocab: dict[str, int]) -> dict[str, Any] | None:
    bos = family.config.get("bos_token")
    if bos is None or bos == "<|im_start|>":
        return None
    special = {"SpecialToken": {"id": bos, "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [special, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [special, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {bos: {"id": bos, "ids": [vocab[bos]], "tokens": [bos]}},
    }
