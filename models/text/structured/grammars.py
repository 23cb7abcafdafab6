"""Compilation of grammars for one model, within limits of time and memory.

A thinking model thinks first: the answer's grammar begins behind the thinking section, in its family's form.
"""

import json
import re
from collections import OrderedDict
from collections.abc import Callable
from functools import cached_property
from threading import Thread
from typing import TYPE_CHECKING, Any, Literal

from headrace.models.text.structured.matcher import MatcherGrammar, first_line
from headrace.models.text.structured.source import GrammarSource, Kind
from headrace.models.text.structured.token_trie import TokenTrie
from headrace.models.text.thinking import CLOSE, OPEN
from headrace.models.text.tokenizer import Tokenizer
from headrace.runtime.errors import UsageError

if TYPE_CHECKING:
    from llguidance import LLMatcher

Thinks = Literal["no", "may", "open"]
"""Thinking before an answer: none, a section that the model may begin, or one that the prompt has begun."""

MAX_TEXT = 256 << 10  # bytes of a grammar
MAX_NESTING = 200  # brackets in a Lark grammar or a regular expression
_LONGEST_S = 2.0  # to compile
_KEPT = 16  # compiled grammars
_IN_REGEX = re.compile(r"^error: (.+)$", re.MULTILINE)
_ATTRIBUTES = re.compile(r"^[ \t]*[?!]?\w+[ \t]*\[([^\]\n]*)\][ \t]*:", re.MULTILINE)  # of a rule, in brackets
_COUNTED = re.compile(r"\b(max_tokens|temperature|stop)\b")  # need tokens to be counted, or taken back
_UNIMPLEMENTED = re.compile(r"Unimplemented keys: \[(.+)\]")
# Of llguidance. A lexer state takes 1 to 2 kB; fuel of one mask about 15 ms, of a grammar about 20 ms.
_LIMITS: dict[str, Any] = {"max_lexer_states": 50_000, "max_grammar_size": 200_000, "verbose_errors": False}


class Grammars:
    """Compiler and compiled grammars of one model."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """vocab_size: logits of the network."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._compiled: OrderedDict[tuple[GrammarSource, Thinks, str], MatcherGrammar] = OrderedDict()

    def compile(self, source: GrammarSource, thinks: Thinks = "no", begun: str = "") -> MatcherGrammar:
        """Return a grammar, from the cache if it was compiled before. begun: text that the answer begins with.

        Raises UsageError, one line, for a grammar that is wrong, cannot be honoured wholly, or exceeds a limit.
        """
        key = source, thinks, begun
        if (grammar := self._compiled.get(key)) is None:
            matcher = self._matcher(source, thinks)
            if begun and not matcher.consume_tokens(self.trie(begun)):
                raise UsageError(f"the answer so far does not fit the {source.kind}")
            grammar = self._compiled[key] = MatcherGrammar(matcher, self._vocab_size, self.trie.ends)
            while len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(key)
        return grammar

    @cached_property
    def trie(self) -> TokenTrie:
        """The vocabulary. Raises UsageError if it cannot be constrained."""
        return TokenTrie(self._tokenizer, self._vocab_size)

    def _matcher(self, source: GrammarSource, thinks: Thinks) -> "LLMatcher":
        _check_size(source)
        built = self.trie.built
        lead = self._lead(thinks)

        def compiled() -> "tuple[LLMatcher, str]":
            from llguidance import LLMatcher, LLParserLimits

            grammar = json.dumps({"grammars": _grammars(source, lead)}, ensure_ascii=False)
            matcher = LLMatcher(built, grammar, log_level=0, limits=LLParserLimits(**_LIMITS))
            warnings = [] if matcher.is_error() else matcher.get_grammar_warnings()
            matcher.compute_bitmask()
            return matcher, matcher.get_error() or next(iter(warnings), "")

        matcher, error = _within(_LONGEST_S, compiled, source.kind)
        if error:
            raise UsageError(f"{source.kind}: {_plain(error, source.kind)}")
        return matcher

    def _lead(self, thinks: Thinks) -> str:
        """Return the rules of the text before an answer in Lark, `lead` first; "" for none."""
        form, trie = self._tokenizer.thinking_form, self.trie
        rules = ["TEXT: /(.|\\n)*/", "LINES: /\\n{1,2}/", 'SPACE: " "']
        space = "SPACE?" if self._tokenizer.strips_first_space else ""
        if thinks == "no":
            return "\n".join([f"lead: {space}", *rules]) if space else ""
        if form is not None and len(form.ids) == 4:  # Harmony
            mark = {text: f"<[{index}]>" for index, text in form.ids.items()}
            channel, message, end, start = (mark[f"<|{name}|>"] for name in ("channel", "message", "end", "start"))
            thought = f'thought: {channel} CHANNEL {message} TEXT {end} {start} "assistant"'
            channels = "CHANNEL: /(analysis|commentary)[^<]{0,80}/"
            return "\n".join([f'lead: thought* {channel} "final" {message}', thought, channels, *rules])
        names = {name: index for index, name in form.ids.items()} if form else {}
        marks = [names.get("open", self._tokenizer.token_id(OPEN)), names.get("close", self._tokenizer.token_id(CLOSE))]
        first, last = (f"<[{index}]>" if index in trie.marks else "" for index in marks)
        section = f"TEXT {last} LINES?" if last else "rest LINES?"
        rest = f"rest[lazy]: /(.|\\n)*{re.escape(CLOSE)}/".replace("/t", "\\/t")
        opening = first or json.dumps(OPEN)
        lead = f"lead: {section}" if thinks == "open" else f"lead: {space} ({opening} {section})?"
        return "\n".join([lead, *([] if last else [rest]), *rules])


def _grammars(source: GrammarSource, lead: str) -> list[dict[str, Any]]:
    """Return llguidance's list of grammars: the answer's, behind `lead`."""
    from llguidance import LLMatcher

    if source.kind == "schema":
        schema = json.loads(source.text)
        compact = {"whitespace_flexible": False}
        answer: dict[str, Any] = {
            "json_schema": {**(schema if isinstance(schema, dict) else {}), "x-guidance": compact}
        }
    elif source.kind == "regex":
        [answer] = json.loads(LLMatcher.grammar_from_regex(source.text))["grammars"]
    else:
        answer = {"lark_grammar": source.text}
    if not lead:
        return [answer]
    return [{"name": "whole", "lark_grammar": f"start: lead @answer\n{lead}"}, {**answer, "name": "answer"}]


def _check_size(source: GrammarSource) -> None:
    """Raise UsageError for a text that is too long, or nested so deeply that its parser could overflow the stack."""
    size = len(source.text.encode(errors="replace"))
    if size > MAX_TEXT:
        raise UsageError(f"the {source.kind} is too large: {size} bytes, where one may have {MAX_TEXT}")
    depth = deepest = 0
    for char in source.text if source.kind != "schema" else "":
        depth += (char in "([{") - (char in ")]}")
        deepest = max(deepest, depth)
    if deepest > MAX_NESTING:
        raise UsageError(f"the {source.kind} is nested too deeply: more than {MAX_NESTING} brackets")
    if source.kind == "grammar":
        for attributes in _ATTRIBUTES.findall(source.text):
            if (found := _COUNTED.search(attributes)) is not None:
                raise UsageError(f"grammar: {found[1]} is not supported", "suffix or lazy end a rule")


def _within(seconds: float, call: "Callable[[], tuple[LLMatcher, str]]", kind: Kind) -> "tuple[LLMatcher, str]":
    """Return the result of a call. Raises UsageError if it takes longer; its thread then ends by its own limits."""
    results: list[tuple[LLMatcher, str]] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:  # panics of the library are no Exceptions
            errors.append(error)

    thread = Thread(target=run, name="grammar", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise UsageError(f"{kind}: {_plain(str(errors[0]), kind)}")
    if not results:
        raise UsageError(f"the {kind} is too complex: it takes more than {seconds:g} s to compile")
    return results[0]


def _plain(error: str, kind: Kind) -> str:
    """Return llguidance's error in one line that names the keyword."""
    if (found := _IN_REGEX.search(error)) is not None:
        place = {"schema": "pattern: ", "regex": ""}.get(kind, f"{error.partition(' (in regex)')[0]}: ")
        return f"{place}{found[1]}"
    if (found := _UNIMPLEMENTED.search(error)) is not None:
        return f"{found[1].replace(chr(34), '')} cannot be guaranteed; leave it out or say it another way"
    return first_line(error).partition(". Enable '")[0]
