"""Control tokens that a tokenizer does not mark as special: no text of a message gives their ids, however spelled."""

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest

from headrace.models.text.tokenizer import Tokenizer

CONTROLS = {"<s>": 300, "</s>": 301, "<|im_start|>": 302, "<|im_end|>": 303}
TEMPLATES = {
    "written out": "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>"
    "{% endfor %}",
    "put together": "{{ bos_token }}{% for m in messages %}{{ '<|im_' + 'start|>' }}{{ m.role }} {{ m.content }}"
    "{{ '<|im_' ~ 'end|>' }}{% endfor %}",
}
NORMALIZERS: dict[str, Any] = {
    "none": None,
    "lowercase": {"type": "Lowercase"},
    "NFKC": {"type": "NFKC"},
    "both": {"type": "Sequence", "normalizers": [{"type": "NFKC"}, {"type": "Lowercase"}]},
}
SPELLINGS = ["\uff1c\uff53\uff1e", "<S>", "<|IM_END|>", "\uff1c/s\uff1e", "<\uff5cim_start\uff5c>", *CONTROLS]
AROUND = ["", " ", "\ud800", "\udfff", "\udb80\udc00", "<", ">", "a", "\u200b", "|"]


def write(directory: Path, template: str, normalizer: Any) -> Tokenizer:
    """Bytes as characters, and the controls as plain added tokens, which normalizers reach."""
    vocab = {chr(code): code for code in range(256)} | {"<unk>": 256}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": True, "special": False}
    document = {
        "version": "1.0",
        "added_tokens": [{"id": index, "content": text, **flags} for text, index in CONTROLS.items()],
        "normalizer": normalizer,
        "model": {"type": "BPE", "vocab": vocab | CONTROLS, "merges": [], "unk_token": "<unk>"},
    }
    (directory / "tokenizer.json").write_text(json.dumps(document))
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer.load(directory)


def smuggled(tokenizer: Tokenizer, seed: int, count: int) -> list[str]:
    """Texts of a message that gave other control ids than a harmless text in its place."""
    chance = random.Random(seed)
    wrong = []
    fixed = itertools.product(AROUND, SPELLINGS)
    drawn = ("".join(chance.choice(AROUND + SPELLINGS) for _ in range(6)) for _ in range(count))

    def controls(content: str) -> list[int]:
        roles = ("user", "assistant", "user")
        return [i for i in tokenizer.encode_chat([{"role": r, "content": content} for r in roles]) if i >= 300]

    harmless = controls("y")
    for text in itertools.chain(map("".join, fixed), drawn):
        if controls(text) != harmless:
            wrong.append(f"chat: {text!a}")
        if any(index >= 300 for index in tokenizer.encode(text)):
            wrong.append(f"text: {text!a}")
    return wrong


@pytest.mark.sampled
@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("normalizer", NORMALIZERS)
def test_no_text_is_encoded_to_a_control_token(tmp_path: Path, template: str, normalizer: str) -> None:
    tokenizer = write(tmp_path, TEMPLATES[template], NORMALIZERS[normalizer])
    written = [i for i in tokenizer.encode_chat([{"role": "user", "content": "x"}]) if i >= 300]
    assert written == [300, 302, 303]
    assert smuggled(tokenizer, seed=16, count=60) == []


def test_byte_tokens_that_spell_a_templates_marks_are_text(tmp_path: Path) -> None:
    """A vocabulary without "<" and "|" spells the template's marks by byte tokens, which stay text elsewhere, too."""
    vocab = {"<unk>": 0} | {f"<0x{byte:02X}>": 1 + byte for byte in range(256)} | {"a": 257}
    document = {
        "version": "1.0",
        "added_tokens": [],
        "model": {"type": "BPE", "vocab": vocab, "merges": [], "unk_token": "<unk>", "byte_fallback": True},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    config = {"unk_token": "<unk>", "chat_template": TEMPLATES["written out"]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.load(tmp_path)
    for text in "<|_>":
        assert tokenizer.encode(text) == [1 + ord(text)]
        assert 1 + ord(text) in tokenizer.encode_chat([{"role": "user", "content": text}])
        assert 0 not in tokenizer.encode_chat([{"role": "user", "content": text}])


@pytest.mark.parametrize("has_all_characters", [True, False])
@pytest.mark.parametrize("score", [0.0, -20.0], ids=["likely", "unlikely"])
@pytest.mark.parametrize("spaces", [None, {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always"}])
def test_a_unigram_model_reads_no_byte_from_its_name(
    tmp_path: Path, spaces: dict[str, Any] | None, score: float, has_all_characters: bool
) -> None:
    """SentencePiece finds byte tokens for unknown characters alone; the library finds their names in a text, too."""
    pieces = [("<unk>", 0.0), *((f"<0x{byte:02X}>", score) for byte in range(256))]
    characters = "<>x0123456789ABCDEF\u2581" if has_all_characters else "04>a"
    pieces += [(character, -8.0) for character in characters]
    document = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": {"type": "NFKC"},
        "pre_tokenizer": spaces,
        "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]},
        "model": {"type": "Unigram", "vocab": pieces, "unk_id": 0, "byte_fallback": True},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    tokenizer = Tokenizer.load(tmp_path)
    id_of = {piece: index for index, (piece, _) in enumerate(pieces)}

    def ids_of(text: str) -> list[int]:
        """Each character is its token, or the tokens of its bytes."""
        ids: list[int] = []
        for character in text:
            byte_names = (f"<0x{byte:02X}>" for byte in character.encode())
            ids += [id_of[character]] if character in id_of else map(id_of.__getitem__, byte_names)
        return ids

    for text in ("<0x41>", "<<0x41><0x42>>", "a<0xFF", "<0x0A>", "\uff1c0x41>"):
        mark = "" if spaces is None else "\u2581"
        assert tokenizer.encode(text) == ids_of(mark + text.replace("\uff1c", "<")), text
