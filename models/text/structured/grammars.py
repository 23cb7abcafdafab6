"""Compilation of grammars for one model, within limits of time and memory.

A thinking model thinks first: the answer's grammar begins after the thinking section, in its family's form.

Guards: tests/models/text/structured/test_grammars.py and test_masks.py.
"""

import json
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import cached_property
from threading import Lock
from typing import Any, Literal

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from msgspec.structs import replace

from headrace.models.text.structured import trial
from headrace.models.text.structured.grammar_source import MAX_BYTES, GrammarKind, GrammarSource, schema_text
from headrace.models.text.structured.json_scan import JsonTokens
from headrace.models.text.structured.matcher import MatcherGrammar, first_line
from headrace.models.text.structured.trial import Trial, TrialError
from headrace.models.text.thinking import CLOSE, OPEN
from headrace.models.text.tokenizer import Tokenizer
from headrace.models.text.tools.form import CallRules, ToolForm, call_rules, quoted
from headrace.models.text.tools.use import ToolUse
from headrace.runtime.config.typed import as_mapping
from headrace.runtime.errors import UsageError

Thinks = Literal["no", "may", "once", "open"]
"""Thinking before an answer: none, a section that the model may begin, or one that the prompt has begun.

Where thoughts are messages of their own, `may` allows several, and `once` one: a budget ends the first alone.
"""

MAX_TEXT = MAX_BYTES  # of a request's regular expression or grammar, too
MAX_NESTING = 200  # brackets in a Lark grammar or a regular expression
_MAX_COMPILED = 64  # compiled grammars: those of many tools, too
_MAX_TOOLS = 2 << 20  # bytes of the grammar of all tools, and of the thinking before them
_TOOLS = "grammar of the tools"  # in messages
_UNMARKED = "calls without markup are checked only if they are forced"
_ANCHOR = "\n"  # text before which a tokenizer puts its space, if it adds one
_CANNOT = "this model's answers cannot be constrained"
_COMPACT = {"whitespace_flexible": False}
# The attributes of a rule in Lark, `max_tokens=9` of `thought[max_tokens=9]: TEXT`.
_ATTRIBUTES = re.compile(r"^[ \t]*[?!]?\w+[ \t]*\[([^\]\n]*)\][ \t]*:", re.MULTILINE)
_COUNTED = re.compile(r"\b(max_tokens|temperature|stop)\b")  # need tokens to be counted, or taken back
# In llguidance's messages: the fault of a regular expression, and keywords.
_IN_REGEX = re.compile(r"^error: (.+)$", re.MULTILINE)
_UNIMPLEMENTED = re.compile(r"Unimplemented keys: \[(.+)\]")
# llguidance's bounds on memory (a lexer state takes 1 to 2 kB) and on the length of errors. Its own limits on time
# stay: tens of milliseconds for a grammar and for a mask.
_LIMITS: dict[str, Any] = {
    "max_lexer_states": 50_000,
    "max_grammar_size": 200_000,
    "max_items_in_row": 8000,
    "verbose_errors": False,
}


class TokenTrie:
    """A model's vocabulary as llguidance's token trie: the bytes of every token, and the tokens of forced text.

    llguidance reads the attributes and calls the object: their names are its own. V = logits of the network.

    marks: ids of control tokens, which a grammar names by id (`<[7]>`); no text contains them.
    """

    is_tokenizer_wrapper = True  # read by llguidance, as are the lower-case attributes below
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """Raises UsageError for a tokenizer without an end of turn, or tokens without bytes of their own."""
        tokens = tokenizer.detokenizers.token_bytes(vocab_size)
        if tokens is None:
            raise UsageError(f"{_CANNOT}: the text of a token depends on its neighbours")
        self.tokens = tokens
        self.ends = sorted(index for index in tokenizer.eos_ids if index < vocab_size)
        if not self.ends:
            raise UsageError(f"{_CANNOT}: the tokenizer has no end-of-turn token")
        self.eos_token_id = self.ends[0]
        # Control tokens: ends, special tokens, and those of thinking.
        marks = {*self.ends, *tokenizer.detokenizers.special, tokenizer.token_id(OPEN), tokenizer.token_id(CLOSE)}
        if tokenizer.thinking_form is not None:
            marks |= set(tokenizer.thinking_form.ids)
        self.marks = frozenset(index for index in marks if index is not None and index < vocab_size)
        self.special_token_ids = sorted(self.marks)
        self._tokenizer = tokenizer

    @cached_property
    def built(self) -> LLTokenizer:
        """llguidance's tokenizer. Building it takes about a second for 150,000 tokens."""
        return LLTokenizer(self, eos_token=self.ends)  # type: ignore[arg-type]

    def __call__(self, text: str) -> list[int]:
        """Return the tokens of a text within an answer, as the model would split it; their bytes are the text's.

        No control token is among them, also where the text is written like one: it could end the model's turn.
        """
        wanted = text.encode()
        for anchor in ("", _ANCHOR):  # after an anchor: a space that the tokenizer adds is cut off with it
            ids = self._tokenizer.encode_here(anchor + text)
            for start in range(min(3, len(ids))):  # the anchor, and a space before it, are two tokens at most
                tokens = ids[start:]
                if all(map(self._is_text, tokens)) and b"".join(self.tokens[index] for index in tokens) == wanted:
                    return tokens
        return self._longest_first(wanted)

    def _longest_first(self, data: bytes) -> list[int]:
        """Return the longest token at each position: for text that looks like control tokens."""
        ids = []
        at = 0
        while at < len(data):
            pieces = (data[at : at + size] for size in range(min(self._longest, len(data) - at), 0, -1))
            longest = next((piece for piece in pieces if piece in self._id_of), None)
            if longest is None:
                return []  # a byte without a token: nothing is forced
            ids.append(self._id_of[longest])
            at += len(longest)
        return ids

    def _is_text(self, index: int) -> bool:
        """Return whether a token has text, and is no control token."""
        return index < len(self.tokens) and index not in self.marks

    @cached_property
    def _id_of(self) -> dict[bytes, int]:
        """Ids of tokens with text, by their bytes."""
        return {data: index for index, data in enumerate(self.tokens) if data and index not in self.marks}

    @cached_property
    def _longest(self) -> int:
        """The most bytes of a token with text."""
        return max(map(len, self._id_of), default=0)


class Grammars:
    """Compiler and compiled grammars of one model."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """vocab_size: logits of the network."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._compiled: OrderedDict[object, MatcherGrammar] = OrderedDict()
        self._lock = Lock()

    def compile(
        self, source: GrammarSource | None, thinks: Thinks = "no", begun: str = "", calls: CallRules | None = None
    ) -> MatcherGrammar:
        """Return a grammar, from the cache if it was compiled before.

        source: the schema, expression or grammar of the answer; None: any text, or calls alone.
        thinks: the thinking before the answer.
        begun: text that the answer begins with.
        calls: rules of tool calls, instead of a text or besides; None: the answer has none.

        Raises UsageError, one line, for a grammar that is wrong, cannot be honoured wholly, or exceeds a limit.
        """
        key = (source, thinks, begun, calls)
        grammar = self._compiled.get(key)
        if grammar is None:
            # Outside the lock, so that other grammars are found meanwhile. Two threads may compile the same one.
            grammar = self._compile(source, thinks, begun, calls)
        with self._lock:  # several threads may compile
            self._compiled[key] = grammar
            self._compiled.move_to_end(key)
            while len(self._compiled) > _MAX_COMPILED:
                self._compiled.popitem(last=False)
        return grammar

    def _compile(
        self, source: GrammarSource | None, thinks: Thinks, begun: str, calls: CallRules | None
    ) -> MatcherGrammar:
        """Compile a grammar. See `compile`.

        The masks of `JsonTokens` refuse a key that comes twice or is spelled with needless escapes. They need an answer
        that is JSON alone; with calls, or without a token that begins it, the schema's grammar has to refuse these.
        """
        kind: GrammarKind = "tools"
        json_tokens = None
        if source is not None:
            kind = source.kind
        if source is not None and kind == "schema":
            if calls is None:
                json_tokens = self._json_tokens(thinks, begun)
            if json_tokens is None:  # masks do not keep keys apart: the grammar has to
                source = replace(source, text=schema_text(json.loads(source.text), masks_spell_keys=False))
        matcher = self._matcher(source, self._whole(thinks, source, calls), kind)
        if begun and not matcher.consume_tokens(self.trie(begun)):
            raise UsageError(f"the answer so far does not fit the {kind}")
        return MatcherGrammar(matcher, self._vocab_size, self.trie.ends, json_tokens)

    def refusal(self, schema: Mapping[str, object]) -> str | None:
        """Return the reason for which a schema of a tool's arguments cannot be honoured; None if it can."""
        try:
            self.compile(GrammarSource("schema", schema_text(schema, masks_spell_keys=False)))
        except UsageError as error:
            return str(error)
        return None

    def call_rules(self, use: ToolUse, form: ToolForm) -> tuple[CallRules | None, dict[str, str]]:
        """Return the rules of a request's calls, and the tools whose calls may have any arguments, with the reason.

        These are optional ones of a schema that cannot be honoured, or of a form without markup. Raises UsageError for
        a forced or strict tool of such a schema.
        """
        if not (use.is_forced or form.rule_begin):
            return None, {tool.name: _UNMARKED for tool in use.callable}
        tools = dict(use.tools)
        unchecked: dict[str, str] = {}
        for tool in use.callable:
            reason = self.refusal(tool.schema)
            if reason is None:
                parameters = json.loads(schema_text(tool.schema, masks_spell_keys=False))
                tools[tool.name] = replace(tool, parameters=parameters)
                continue
            if use.is_forced or tool.strict:
                raise UsageError(f"tool {tool.name}: {reason}")
            tools[tool.name] = replace(tool, free=True)
            unchecked[tool.name] = reason
        return call_rules(form, use.with_tools(tools), self.literal), unchecked

    def literal(self, text: str) -> str:
        """Return a text as Lark, its control tokens by their ids."""
        terms = []
        for index, part in enumerate(self._control_texts.split(text)):
            is_control = index % 2 == 1  # `split` returns the texts between matches, and the matches
            token = self._tokenizer.token_id(part)
            if is_control and token is not None:
                terms.append(f"<[{token}]>")
            else:
                terms.append(quoted(part))
        return " ".join(filter(None, terms))

    @cached_property
    def _control_texts(self) -> re.Pattern[str]:
        """A pattern of the control tokens' texts, in one group for `split`. Longer ones are tried first."""
        texts = sorted((self._tokenizer.token_text(index) for index in self.trie.marks), key=len, reverse=True)
        return re.compile(f"({'|'.join(map(re.escape, filter(None, texts)))})")

    @cached_property
    def trie(self) -> TokenTrie:
        """The vocabulary. Raises UsageError if it cannot be constrained."""
        return TokenTrie(self._tokenizer, self._vocab_size)

    def _json_tokens(self, thinks: Thinks, begun: str) -> JsonTokens | None:
        """Return the vocabulary of an answer of JSON; None if no token marks its beginning."""
        if thinks == "no":
            return self._vocabulary.after_text(begun)
        _, index = self._thinking_marks
        if self._has_channels:
            index = self._tokenizer.token_id("<|message|>")
        if index is None:
            return None
        return self._vocabulary.beginning_behind(index)

    @cached_property
    def _vocabulary(self) -> JsonTokens:
        """The vocabulary of answers that are JSON from their beginning."""
        return JsonTokens(self.trie.tokens)

    @cached_property
    def _thinking_marks(self) -> list[int | None]:
        """The tokens that begin and end thinking; None where they are text."""
        form = self._tokenizer.thinking_form
        names: dict[str, int] = {}
        if form is not None:
            names = {name: index for index, name in form.ids.items()}
        return [names.get("open", self._tokenizer.token_id(OPEN)), names.get("close", self._tokenizer.token_id(CLOSE))]

    @cached_property
    def _trial(self) -> Trial:
        """The process in which a grammar is compiled first."""
        return Trial(self._vocab_size, {index: self.trie.tokens[index] for index in self.trie.marks}, self.trie.ends)

    def _matcher(self, source: GrammarSource | None, whole: str, kind: GrammarKind) -> LLMatcher:
        """Return the matcher of `whole`, rules that name a grammar `@fits` for the source, or of the source alone."""
        _check_texts(source, whole)
        grammar = json.dumps({"grammars": _grammars(source, whole)}, ensure_ascii=False)
        # The trial's process starts while the trie is built.
        self._trial.start()
        built = self.trie.built
        try:
            self._trial.check(grammar, _LIMITS)
            matcher = LLMatcher(built, grammar, log_level=0, limits=LLParserLimits(**_LIMITS))
            warnings: Sequence[str] = []
            if not matcher.is_error():
                warnings = matcher.get_grammar_warnings()
            matcher.compute_bitmask()  # a limit may be exceeded by the first mask only
            error = matcher.get_error() or next(iter(warnings), "")
        except TrialError:
            name = _TOOLS if kind == "tools" else kind
            raise UsageError(
                f"the {name} is too complex: it takes more than {trial.SECONDS} s or {trial.MEMORY >> 30} GB to compile"
            ) from None
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as panic:  # of the library, which is no Exception
            error = str(panic)
        if error:
            raise UsageError(f"{kind}: {_plain(error, kind)}")
        return matcher

    def _whole(self, thinks: Thinks, source: GrammarSource | None, calls: CallRules | None) -> str:
        """Return the Lark grammar around the source's; "" if that is all."""
        lead = self._lead(thinks)
        fits = ""
        text = ""
        if source is not None:
            form = self._tokenizer.thinking_form
            head = ""
            if form is not None and form.has_channels and thinks != "no":
                head = self.literal(form.answer_head)
            fits = f"{head} @fits"
        if calls is not None:
            if calls.forced:
                fits = "calls"
            elif fits:
                fits = f"(calls | {fits})"
            else:
                fits = "answer"
            text = calls.text
        elif not any(lead) and fits.strip() == "@fits":
            return ""
        rules = ["TEXT: /(.|\\n)*/", "LINES: /\\n{1,2}/", 'SPACE: " "']
        return "\n".join([f"start: {lead[0]} {fits}", *lead[1:], text, *rules])

    @property
    def _has_channels(self) -> bool:
        """True if answers have channels, see `ThinkingForm`."""
        form = self._tokenizer.thinking_form
        return form is not None and form.has_channels

    def _lead(self, thinks: Thinks) -> list[str]:
        """Return Lark: first the text before an answer, for the rule `start`, then the rules that it needs.

        `TEXT`, `LINES` and `SPACE` are defined by `_whole`.
        """
        space = ""
        if self._tokenizer.detokenizers.strips_first_space:
            space = "SPACE?"
        if thinks == "no":
            return [space]
        form = self._tokenizer.thinking_form
        thoughts = "thought?" if thinks == "once" else "thought*"
        if form is not None and form.has_tags:
            section = f"TEXT {self.literal(form.closing)}"
            if thinks == "open":
                return [section]
            return [f"({self.literal(form.opening)} {section})?"]
        if form is not None and form.has_recipients:
            return [thoughts, f"thought: {self.literal(form.opening)} TEXT {self.literal(form.end_of_thought)}"]
        if self._has_channels:
            head = self.literal("<|channel|>")
            end = self.literal("<|end|><|start|>assistant")
            thought = f"thought: {head} CHANNEL {self.literal('<|message|>')} TEXT {end}"
            return [thoughts, thought, "CHANNEL: /analysis|commentary/"]
        # Other families: tags around one section. A tag may be a token or text, each by itself.
        first, last = (f"<[{index}]>" if index in self.trie.marks else "" for index in self._thinking_marks)
        if last:
            section = f"TEXT {last} LINES?"
            rules = []
        else:  # the end of thinking is text
            section = "thinking LINES?"
            close = re.escape(CLOSE).replace("/", "\\/")
            rules = [f"thinking[lazy]: /(.|\\n)*{close}/"]
        if thinks == "open":
            return [section, *rules]
        return [f"{space} ({first or quoted(OPEN)} {section})?", *rules]


def _grammars(source: GrammarSource | None, whole: str) -> list[dict[str, object]]:
    """Return llguidance's list of grammars: `whole`, if there is one, and the source's."""
    if source is None:
        return [{"lark_grammar": whole}]
    answer: dict[str, object] = {"lark_grammar": source.text}
    if source.kind == "schema":
        answer = {"json_schema": {**as_mapping(json.loads(source.text)), "x-guidance": _COMPACT}}
    elif source.kind == "regex":
        [answer] = json.loads(LLMatcher.grammar_from_regex(source.text))["grammars"]
    if not whole:
        return [answer]
    return [{"name": "whole", "lark_grammar": whole}, {**answer, "name": "fits"}]


def _check_texts(source: GrammarSource | None, whole: str) -> None:
    """Raise UsageError for a text that llguidance must not parse.

    It may be too long, or nested so deeply that the parser could overflow the stack. whole: see `Grammars._matcher`.
    """
    _check_size(whole, _TOOLS, _MAX_TOOLS, "offer fewer tools, or shorter schemas")
    if source is None:
        return
    _check_size(source.text, source.kind, MAX_TEXT)
    if source.kind in ("regex", "grammar") and _nesting(source.text) > MAX_NESTING:
        raise UsageError(f"the {source.kind} is nested too deeply: more than {MAX_NESTING} brackets")
    if source.kind == "grammar":
        for attributes in _ATTRIBUTES.findall(source.text):
            match = _COUNTED.search(attributes)
            if match is not None:
                raise UsageError(f"grammar: {match[1]} is not supported", "suffix or lazy end a rule")


def _check_size(text: str, name: str, max_bytes: int, hint: str | None = None) -> None:
    """Raise UsageError for a text that is longer, or has a lone surrogate. name: of the text, for the message."""
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise UsageError(f"the {name} has a lone surrogate, which no text contains") from None
    if size > max_bytes:
        raise UsageError(f"the {name} is too large: {size} bytes, where one may have {max_bytes}", hint)


def _nesting(text: str) -> int:
    """Return the most brackets that are open at a place, in quotes or not."""
    depth = 0
    deepest = 0
    for char in text:
        depth += (char in "([{") - (char in ")]}")
        deepest = max(deepest, depth)
    return deepest


def _plain(error: str, kind: GrammarKind) -> str:
    """Return llguidance's error in one line that names the keyword."""
    match = _IN_REGEX.search(error)
    if match is not None:
        prefix = {"schema": "pattern: ", "regex": ""}.get(kind, f"{error.partition(' (in regex)')[0]}: ")
        return f"{prefix}{match[1]}"
    match = _UNIMPLEMENTED.search(error)
    if match is not None:
        return f"{match[1].replace(chr(34), '')} cannot be guaranteed; leave it out or say it another way"
    if "patternProperty regexes" in error:
        return "overlapping patterns of keys, or open objects in allOf, cannot be guaranteed; close the objects"
    if "determine if regex is empty" in error:
        return "these patterns are too complex to hold together; give one pattern"
    if "NoExtension" in error:
        return "no answer fits it"
    return first_line(error).partition(". Enable '")[0]
