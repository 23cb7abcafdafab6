"""Encoding and decoding with a checkpoint's tokenizer, over the Rust `tokenizers` library.

User text never becomes control tokens in `encode`, `encode_prompt` or message contents, and ordinary text gets the
same ids as in transformers. Text in which a control token is spelled goes through a second encoder for that, the
shadow (`control_tokens` explains it). Instances are immutable and thread-safe.

Guards: tests/models/text/test_tokenizer.py and test_control_tokens.py.
"""

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.models.checkpoint.side_file import has_side_file, read_json_object
from headrace.models.text.answer_streams import (
    MarkedStream,
    RecipientStream,
    ResponseStream,
    asks_for_tags,
    has_recipients,
)
from headrace.models.text.chat_template import ChatTemplate, Message, read_sources
from headrace.models.text.control_tokens import TURN_ENDS, ControlTokens, looks_like_markup, markup_in
from headrace.models.text.detokenizer import Detokenizer, DetokenizerFactory
from headrace.models.text.encoding import MAX_TEXT, Encoder, limited
from headrace.models.text.template_text import TemplateText
from headrace.models.text.thinking_forms import TaggedStream, ThinkingForm, ThinkingStream, thinking_form
from headrace.models.text.tokenizers_library import (
    PanicError,
    keep_byte_names,
    library_errors,
    load_tokenizer,
    panics_hidden,
)
from headrace.runtime.config.typed import as_mapping
from headrace.runtime.errors import CheckpointError, ContextLimitError, UsageError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as RustTokenizer

_FAILED = "the tokenizer failed"
# Half of a character outside of the first 65,536, which no text contains alone.
_SURROGATE = re.compile("[\ud800-\udfff]")
_PROBE = "".join(char * 99 for char in "aA1 _-.<é漢\n")  # runs, at which slow regular expressions are slowest


def _read_object(file: Path) -> dict[str, object]:
    """Return the object in a JSON file; {} without the file."""
    if not has_side_file(file):
        return {}
    return read_json_object(file)


class Tokenizer:
    """Text to token ids and back, with the chat template of one checkpoint."""

    def __init__(
        self, rust: "RustTokenizer", configs: Mapping[str, Mapping[str, object]], sources: dict[str, str]
    ) -> None:
        """configs: the checkpoint's JSON files by name, missing ones empty. sources: its chat templates."""
        self._rust = rust
        self._encoder = Encoder(rust)
        self._config = configs["tokenizer_config.json"]
        self._special_texts = _special_texts(self._config, configs["special_tokens_map.json"])
        self.template_source = "\n".join(sources.values())
        self.chat_template: ChatTemplate | None = None
        if sources:
            self.chat_template = ChatTemplate(sources, self._special_texts)
        self.vocab_size: int = rust.get_vocab_size(with_added_tokens=True)
        # In this order: `_find_eos_ids` reads the texts and the template above, and `_find_controls` the end tokens.
        self.eos_ids = self._find_eos_ids(configs)
        self._controls = self._find_controls()
        self.detokenizers = DetokenizerFactory(rust)

    @classmethod
    def load(cls, directory: Path) -> "Tokenizer":
        """Read tokenizer.json (or another format), its configuration files and the chat template.

        Raises UnsupportedModelError without a tokenizer, CheckpointError for unreadable files.
        """
        names = ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json", "config.json")
        configs = {name: _read_object(directory / name) for name in names}
        file = directory / "tokenizer.json"
        if has_side_file(file):
            rust = load_tokenizer(file)
            keep_byte_names(rust)
        else:
            from headrace.models.text.other_formats import read_other_format  # late: imports the library and numpy

            rust, configs["tokenizer_config.json"] = read_other_format(directory, configs["tokenizer_config.json"])
        rust.no_padding()
        rust.no_truncation()
        return cls(rust, configs, read_sources(directory, configs["tokenizer_config.json"]))

    def vocabulary(self) -> dict[int, str]:
        """Return every token by its id, including added ones."""
        return {token: text for text, token in self._rust.get_vocab(with_added_tokens=True).items()}

    # --- text to ids ---------------------------------------------------------------------------------------

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Return the ids of a text, nothing added. special: written-out control tokens become control tokens."""
        ids = self._encoder.encode(_well_formed(text))
        # Only a text with control tokens needs the shadow, which is not made before the first of them.
        if special or self._controls.ids.isdisjoint(ids):
            return ids
        return self._shadow.encode(_well_formed(text))

    def encode_prompt(self, text: str) -> list[int]:
        """Encode a raw prompt without a chat template, after the model's BOS token if it uses one.

        Raises ContextLimitError for text over the limit.
        """
        _check_length([text])
        return self._bos_prefix + self.encode(text)

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        **template_vars: Any,
    ) -> list[int]:
        """Encode a conversation with the model's chat template, whose control tokens alone become control tokens.

        Raises UsageError if the model has no chat template, ContextLimitError for text over the limit, CheckpointError
        if the template fails.
        """
        _check_length(message.get("content") for message in messages)
        template = self.chat_template
        if template is None:
            raise UsageError("this model has no chat template", hint="give it plain text with --raw")
        marked = [self._with_markup(message) for message in messages]
        options = {"add_generation_prompt": add_generation_prompt, **template_vars}
        rendered = template.render(marked, tools=tools, **options)
        prompt = _well_formed_prompt(self._controls.unshield(rendered))
        if not self._controls.has_look_alike(prompt):
            # Encode the prompt as usual, and accept the result if it has exactly the template's control tokens: a
            # normalizer can make one of other characters.
            ids = self._encoder.encode(prompt)
            if [index for index in ids if index in self._controls.ids] == self._controls.find(prompt):
                return ids
        return self._shadow.encode(self._controls.secret(prompt))

    def _with_markup(self, message: Message) -> Message:
        """Return a message in which an assistant's markup, such as thinking, is the template's own text.

        Only its texts are marked: tool calls, and the names of its keys, come from outside.
        """
        if message.get("role") != "assistant":
            return message
        texts = {key: value for key, value in message.items() if isinstance(value, str)}
        return {**message, **{key: self._controls.mark_markup(text) for key, text in texts.items()}}

    def shield(self, text: str, *, markup: bool = False) -> str:
        """Return a text of a message that stays as it is in `encode_chat`, whatever control tokens it spells.

        markup: no markup becomes the template's own either.
        """
        return self._controls.shield(text, markup=markup)

    def encode_here(self, text: str) -> list[int]:
        """Return the ids of a short text, written-out control tokens included, without the limits of `encode`."""
        return self._encoder.encode_here(text)

    def special_texts_in(self, text: str) -> list[str]:
        """Return the texts of special tokens that are written in a text."""
        added_tokens = self._rust.get_added_tokens_decoder().values()
        return [added.content for added in added_tokens if added.special and added.content in text]

    def marked(self, ids: Sequence[int]) -> list[tuple[str, bool]]:
        """Return the text of a sequence in parts: control tokens (True), and text between them (False).

        Neighbours of one kind are one part.
        """
        parts: list[tuple[str, bool]] = []
        stream = self.detokenizer()
        for is_control, run in itertools.groupby(ids, key=self._controls.ids.__contains__):
            piece_of = self.token_text if is_control else stream.add
            parts.append(("".join(map(piece_of, run)), is_control))
        rest = stream.finish()
        if rest:
            parts.append((rest, False))
        return parts

    def token_id(self, text: str) -> int | None:
        """Return the id of a token's text, None if the vocabulary has none."""
        index: int | None = self._rust.token_to_id(text)
        return index

    # --- ids to text ---------------------------------------------------------------------------------------

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Return the text of a whole sequence. Malformed bytes become U+FFFD."""
        with library_errors(_FAILED):
            text: str = self._rust.decode(list(ids), skip_special_tokens=skip_special)
        return text

    def token_text(self, token: int) -> str:
        """Return the text of one token, control tokens included; bytes of a part of a character become U+FFFD."""
        return self.decode([token], skip_special=False)

    def detokenizer(self) -> Detokenizer:
        """Return a new stream; its pieces join to the text that `decode` returns."""
        return self.detokenizers.make()

    @cached_property
    def thinking_form(self) -> ThinkingForm | None:
        """Return the control tokens that mark the model's thinking; None if the marks are text or absent."""
        added = {token.content: index for index, token in self._rust.get_added_tokens_decoder().items()}
        return thinking_form(added.get)

    def answer_stream(self, marks: Mapping[int, str] | None = None, *, thinks: bool = False) -> Detokenizer:
        """Return a new stream for an answer, with thinking as a `<think>` section for every family.

        marks: texts of control tokens around tool calls; None: the answer has no tools. thinks: the prompt has begun
        the section.
        """
        stream = self.detokenizer()
        form = self.thinking_form
        if marks is not None:
            stream = MarkedStream(stream, marks)
        if has_recipients(self.template_source):
            return RecipientStream(stream, calls=marks is not None)
        if asks_for_tags(self.template_source):
            return ResponseStream(stream, thinks=thinks)
        if form is None:
            return stream
        kind = TaggedStream if form.has_tags else ThinkingStream
        return kind(stream, form, calls=marks is not None, thinks=thinks)

    def same_vocabulary(self, other: "Tokenizer") -> bool:
        """Return whether both have the same tokens under the same ids."""
        return bool(self._rust.get_vocab(with_added_tokens=True) == other._rust.get_vocab(with_added_tokens=True))

    # --- from the checkpoint's files -----------------------------------------------------------------------

    @cached_property
    def _shadow(self) -> Encoder:
        """Return the encoder that knows control tokens by secret names only, see `ControlTokens.shadow`.

        Text of a user that spells a control token has no secret name, so it stays text here; `encode_chat` writes the
        names in place of the control tokens of the template.
        """
        with library_errors(_FAILED):
            return Encoder(self._controls.shadow(self._rust))

    @cached_property
    def _bos_prefix(self) -> list[int]:
        """Return the tokens before every text: one BOS token or nothing."""
        # Without `add_bos_token`, the tokenizer's own post-processing decides.
        bos = self._rust.token_to_id(self._special_texts.get("bos_token", ""))
        if bos is None:
            return []
        wanted = self._config.get("add_bos_token")
        if not isinstance(wanted, bool):
            with library_errors(_FAILED):
                wanted = self._rust.encode("", add_special_tokens=True).ids[:1] == [bos]
        if not wanted:
            return []
        return [bos]

    def _find_eos_ids(self, configs: Mapping[str, Mapping[str, object]]) -> frozenset[int]:
        """Return the tokens that end an answer: stated ids, the EOS token, and ends of turns in the template."""
        # Ids that the files state.
        declared: list[Any] = []
        for config in (configs["generation_config.json"], configs["config.json"]):
            for part in (config, as_mapping(config.get("text_config"))):
                ids = part.get("eos_token_id")
                if isinstance(ids, list):
                    declared += ids
                else:
                    declared.append(ids)

        # Ends of turns are found by name only if generation_config.json is silent on end tokens: config.json may state
        # the end of a text alone. In Harmony `<|end|>` ends a channel, such as thinking, and the answer follows.
        silent = configs["generation_config.json"].get("eos_token_id") is None
        texts = [text for text in TURN_ENDS if silent and text in self.template_source]
        if self._rust.token_to_id("<|channel|>") is not None and "<|end|>" in texts:
            texts.remove("<|end|>")
        texts.append(self._special_texts.get("eos_token", ""))
        declared.extend(self._rust.token_to_id(text) for text in texts)
        if any(not (index is None or type(index) is int) for index in declared):
            raise CheckpointError("eos_token_id is neither a token id nor a list of them")
        return frozenset(index for index in declared if index is not None and 0 <= index < self.vocab_size)

    def _find_controls(self) -> ControlTokens:
        """Return the control tokens: declared ones, ends of turns, and markup that the template writes.

        Needs `eos_ids`. Raises CheckpointError for a tokenizer that takes very long.
        """
        # Added tokens: declared ones and ends, and others that look like markup.
        special: dict[str, int] = {}
        markup: dict[str, int] = {}
        ends = self.eos_ids
        named = {*self._special_texts.values(), *TURN_ENDS}
        added_tokens = self._rust.get_added_tokens_decoder()
        for index, added in added_tokens.items():
            if added.special or index in ends or (added.content in named and looks_like_markup(added.content)):
                special[added.content] = index
            elif looks_like_markup(added.content):
                markup[added.content] = index

        # Vocabulary pieces that are no added tokens, but look like control tokens in the template's text.
        written = self._written_between_turns()
        special |= {text: i for text, i in self._pieces_of(written, named).items() if i not in added_tokens}

        # Markup around every turn of a plain chat is control; the model's own, such as thinking, is not.
        turns = {text: index for text, index in markup.items() if text in written and "think" not in text}
        others = {text: index for text, index in markup.items() if text not in turns and text in self.template_source}
        return ControlTokens(special | turns, others)

    def _pieces_of(self, written: str, named: set[str]) -> dict[str, int]:
        """Return vocabulary pieces that look like control tokens and occur in encoded control or template text.

        Unigram and WordPiece models find them in any text, whether they are added tokens or not. Raises CheckpointError
        for a tokenizer that takes very long.
        """
        pieces = {}
        unknown = self._special_texts.get("unk_token")
        ends = {self._rust.id_to_token(index) or "" for index in self.eos_ids}
        texts = [_well_formed(text) for text in (_PROBE, written, *sorted(named | ends | markup_in(written))) if text]
        with panics_hidden():
            encoded = limited(lambda: list(map(self._ids_of, texts)), sum(map(len, texts)))
        for index in itertools.chain.from_iterable(encoded[1:]):  # _PROBE is there for its time
            piece = self._rust.id_to_token(index)
            if piece is not None and piece != unknown and looks_like_markup(piece):
                pieces[piece] = index
        return pieces

    def _ids_of(self, text: str) -> list[int]:
        """Return the ids of a text on this thread, for `limited`; none if the tokenizer fails. A panic is raised."""
        try:
            return self._encoder.encode_here(text)
        except PanicError:
            raise
        except (CheckpointError, ContextLimitError):  # a tokenizer that fails here also fails at a prompt
            return []

    def _written_between_turns(self) -> str:
        """Return a rendered chat of four turns, or of three; "" without a template or if it refuses both."""
        turns = [{"role": role, "content": "x"} for role in ("system", "user", "assistant", "user")]
        for messages in (turns, turns[1:]):  # some templates refuse a system prompt
            with suppress(CheckpointError, UsageError):
                if self.chat_template is not None:
                    return self.chat_template.render(messages, add_generation_prompt=False)
        return ""


def _check_length(texts: Iterable[object]) -> None:
    """Raise ContextLimitError for text that would take minutes to render or encode.

    A fixed limit, since normalizers, unknown characters and space-absorbing tokens can shrink any text in tokens.
    """
    size = sum(len(text) for text in texts if isinstance(text, str))
    if size > MAX_TEXT:
        message = f"the prompt is too long: {size} characters, where one may have {MAX_TEXT}"
        raise ContextLimitError(message, "shorten the prompt")


def _special_texts(*configs: Mapping[str, object]) -> dict[str, str]:
    """Return bos_token, eos_token, ... as text; the first file that names one takes precedence.

    A file may have a text or an object with the key `content`.
    """
    texts: dict[str, str] = {}
    for config in configs:
        for name, value in config.items():
            text = value
            if isinstance(value, Mapping):
                text = value.get("content")
            if name.endswith("_token") and isinstance(text, str):
                texts.setdefault(name, text)
    return texts


def _well_formed_prompt(prompt: TemplateText) -> TemplateText:
    """Replace each lone surrogate by U+FFFD, so that origins stay in place."""
    if _SURROGATE.search(prompt) is None:
        return prompt
    return TemplateText(_SURROGATE.sub("\ufffd", prompt), prompt.origin)


def _well_formed(text: str) -> str:
    """Replace lone surrogates (undecodable bytes of arguments and files) by U+FFFD: the library needs valid Unicode."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
