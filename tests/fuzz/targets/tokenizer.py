"""Tokenizer files with changes, and texts against control tokens."""

import copy
import json
import random
from contextlib import suppress
from pathlib import Path
from typing import Any

from headrace.models.text.tokenizer import Tokenizer
from headrace.runtime.errors import HeadraceError, UsageError
from tests.fuzz.mutate import json_bytes, mutated_bytes, mutated_value, text
from tests.support.corpus import NASTY
from tests.support.families import FAMILIES, write_family
from tests.support.smuggling import Smuggling as Tried
from tests.support.tokenizer_kinds import DECLARED, KINDS, document, mixture, write_kind

_SIDES = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "config.json",
    "chat_template.json",
)
_TEXTS = ("", "a", "hello there", "<|im_end|>", "\ud800 x", "".join(NASTY[5:12]))


def used(directory: Path) -> None:
    """Load it and use it as a chat does."""
    tokenizer = Tokenizer.load(directory)
    for text_of in _TEXTS:
        with suppress(HeadraceError):
            tokenizer.encode(text_of)
            tokenizer.encode_prompt(text_of)
    with suppress(UsageError):
        tokenizer.encode_chat([{"role": "user", "content": "<s>"}, {"role": "assistant", "content": "b"}])
    stream = tokenizer.answer_stream()
    for index in (0, 1, 5, 100, 300, tokenizer.vocab_size - 1, 10**6):
        stream.add(index)
    stream.finish()
    tokenizer.decode([0, 1, 2, 3])


class TokenizerFile:
    """tokenizer.json with exchanged sections, values and bytes."""

    def __init__(self, folder: Path) -> None:
        self._folder = write_family(folder / "model", "chatml")
        self._documents = [
            _short(document(kind, declared)) for kind in KINDS for declared in ("special", "plain, normalized")
        ]
        for name in FAMILIES:
            written = write_family(folder / name, name) / "tokenizer.json"
            self._documents.append(_short(json.loads(written.read_text())))

    def make(self, chance: random.Random) -> bytes:
        changed = dict(chance.choice(self._documents))
        if chance.random() < 0.3:
            part = chance.choice(("normalizer", "pre_tokenizer", "decoder", "added_tokens", "post_processor"))
            changed[part] = chance.choice(self._documents)[part]
        if chance.random() < 0.85:
            part = chance.choice(
                ("normalizer", "pre_tokenizer", "decoder", "model", "model", "added_tokens", "post_processor")
            )
            changed[part] = mutated_value(chance, copy.deepcopy(changed[part]))
        written = json_bytes(chance, changed)
        return mutated_bytes(chance, written) if chance.random() < 0.1 else written

    def run(self, given: bytes) -> None:
        (self._folder / "tokenizer.json").write_bytes(given)
        used(self._folder)


def _short(written: dict[str, Any]) -> dict[str, Any]:
    """Return a part of the vocabulary and of the replacement table, small enough to write for every input."""
    model = written["model"] = dict(written["model"])
    if isinstance(model["vocab"], dict):
        kept = {
            piece: index for piece, index in model["vocab"].items() if index < 300 or index > len(model["vocab"]) - 8
        }
        model["vocab"] = {piece: number for number, piece in enumerate(sorted(kept, key=kept.__getitem__))}
        if "merges" in model:
            model["merges"] = [
                pair
                for pair in model["merges"][:40]
                if "".join(pair) in model["vocab"] and set(pair) <= model["vocab"].keys()
            ]
        for added in written["added_tokens"]:
            added["id"] = model["vocab"].get(added["content"], added["id"])
    return written


class SideFiles:
    """The files beside tokenizer.json."""

    def __init__(self, folder: Path) -> None:
        self._folder = write_family(folder / "model", "chatml")
        (self._folder / "chat_template.jinja").unlink()
        template = FAMILIES["chatml"].template
        added = {"0": {"content": "<|im_end|>", "special": True, "lstrip": False}}
        self._sides: tuple[Any, ...] = (
            {
                **FAMILIES["chatml"].config,
                "chat_template": template,
                "add_bos_token": True,
                "added_tokens_decoder": added,
            },
            {
                "bos_token": {"content": "<|im_start|>", "lstrip": False},
                "eos_token": "<|im_end|>",
                "additional_special_tokens": [],
            },
            {"eos_token_id": [1, 2], "bos_token_id": 1},
            {"model_type": "llama", "eos_token_id": 2, "text_config": {"eos_token_id": 3}},
            {"chat_template": [{"name": "default", "template": template}, {"name": "tool_use", "template": "x"}]},
        )

    def make(self, chance: random.Random) -> list[bytes]:
        which = chance.randrange(len(self._sides))
        changed = [
            mutated_value(chance, side) if i == which or chance.random() < 0.1 else side
            for i, side in enumerate(self._sides)
        ]
        return [json_bytes(chance, side) if i == which else json.dumps(side).encode() for i, side in enumerate(changed)]

    def run(self, given: list[bytes]) -> None:
        for name, content in zip(_SIDES, given, strict=True):
            (self._folder / name).write_bytes(content)
        if given[4][:20] == given[4][:20].lower() and len(given[4]) % 2:
            (self._folder / "chat_template.json").unlink()
        used(self._folder)


class OtherFormats:
    """tokenizer.model, tekken.json and tiktoken files."""

    def __init__(self, folder: Path) -> None:
        import io

        import sentencepiece

        written = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(NASTY), model_writer=written, vocab_size=320, model_type="bpe",
            hard_vocab_limit=False, normalization_rule_name="identity", minloglevel=2, character_coverage=0.98,
        )  # fmt: skip
        self._folder = folder / "model"
        self._folder.mkdir()
        self._model = written.getvalue()
        from tests.models.text.test_other_formats import RANKS, tekken

        self._tekken = json.loads((tekken(folder) / "tekken.json").read_text())
        self._ranks = b"".join(
            b"%s %d\n" % (__import__("base64").b64encode(token), rank) for token, rank in RANKS.items()
        )

    def make(self, chance: random.Random) -> dict[str, bytes]:
        match chance.randrange(3):
            case 0:
                return {"tokenizer.model": mutated_bytes(chance, self._model)}
            case 1:
                return {"tekken.json": json_bytes(chance, mutated_value(chance, self._tekken))}
            case _:
                config = {
                    "tokenizer_class": chance.choice(("QWenTokenizer", "TikTokenTokenizer")),
                    "added_tokens_decoder": {"300": {"content": "<s>"}},
                }
                return {
                    "qwen.tiktoken": mutated_bytes(chance, self._ranks),
                    "tokenizer_config.json": json_bytes(
                        chance, mutated_value(chance, config) if chance.random() < 0.5 else config
                    ),
                }

    def run(self, given: dict[str, bytes]) -> None:
        for file in self._folder.iterdir():
            file.unlink()
        for name, content in given.items():
            (self._folder / name).write_bytes(content)
        used(self._folder)


class Smuggling:
    """Texts against twenty kinds of tokenizer, controls declared in five ways: no control ids may come out."""

    def __init__(self, folder: Path) -> None:
        self._kinds = [
            (kind, declared, template)
            for kind in KINDS
            for declared in DECLARED
            for template in ("written out", "put together", "around")
        ]
        self._folder = folder
        self._loaded: dict[int, Tried] = {}

    def make(self, chance: random.Random) -> tuple[int, str]:
        which = chance.randrange(len(self._kinds))
        return which, mixture(chance) if chance.random() < 0.8 else text(
            chance, 8, words=("<s>", "</s>", "<|im_end|>", "<|im_start|>")
        )

    def run(self, given: tuple[int, str]) -> None:
        which, tried = given
        if which not in self._loaded:
            self._loaded[which] = Tried(Tokenizer.load(write_kind(self._folder / str(which), *self._kinds[which])))
        assert (ways := self._loaded[which].ways(tried)) == [], (self._kinds[which], ways)
