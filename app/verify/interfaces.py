"""The same requests through `run`, `batch`, the Python API and the server, alone and several at once.

Every command runs as a process of its own. Tokens and their log probabilities are compared with those of `run`.
Documents of batch and server have tokens as texts, so their ids are looked up among those of `run` (`_id_of`).

Guard: tests/app/verify/test_verify.py.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

from headrace.app.api import Model, load
from headrace.app.engine.http_address import HTTPAddress
from headrace.app.engine.server_process import server_process
from headrace.app.verify.checks import Begin, CheckResult, VerifyPlan, judged
from headrace.app.verify.expectation import Expectation
from headrace.app.verify.trace import TOP, Trace, compare
from headrace.models.loading.load import LoadedModel
from headrace.runtime.config import environment
from headrace.runtime.engine.request import TokenLogprobs
from headrace.runtime.errors import EngineError, UsageError

_TOPICS = ("rivers", "mills", "bridges", "clouds", "glass", "bread", "trains", "bees")  # one request each, at most
_CHECKS = 6  # of `_ways`: three interfaces, each alone and at once
_WAIT_S = 3600.0  # for one answer
Way = Callable[[], list[Trace]]


class Interfaces:
    """The checks of one model. Raises UsageError for a model without a chat template."""

    def __init__(
        self, loaded: LoadedModel, expected: Expectation, plan: VerifyPlan, path: Path, options: Mapping[str, Any]
    ) -> None:
        """Prepare the requests, without a reference to the network of `loaded`: the checks load the model again.

        loaded: its tokenizer is kept.
        path: the model's directory.
        options: of `load`.
        """
        if loaded.tokenizer.chat_template is None:
            raise UsageError(f"{loaded.name} has no chat template, which --server needs")
        self._expected = expected
        self._path = str(path)
        self._load_options = options
        self._tokenizer = loaded.tokenizer
        self._text_of = loaded.tokenizer.token_text
        self._load = ["-m", self._path, *_flags(options)]
        self._prompts = [f"Write a story about {topic}." for topic in _TOPICS[: plan.sequences]]
        # Sampled tokens may differ beyond near-ties wherever bits may, so only exact models are sampled. All of these
        # are given, so that neither settings nor the model's recommendations fill them in.
        self._options: dict[str, Any] = {
            "temperature": 0.8 if expected.exact else 0.0,
            "seed": plan.seed,
            "max_tokens": plan.tokens,
            "top_k": 0,
            "top_p": 0.95,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
        }

    def run(self, begin: Begin = lambda *_: None) -> Iterator[CheckResult]:
        """Run every check; `begin(number, of, name)` is called before each."""
        begin(0, _CHECKS, "Python API")
        # Both answers of the API are made here, so that this process has freed the model before a command loads it.
        with load(self._path, **self._load_options) as model:
            by_api = self._by_api(model), self._by_api_at_once(model)
        begin(0, _CHECKS, "run, alone")
        expected = [self._by_run(prompt) for prompt in self._prompts]
        for number, ((name, how), serve) in enumerate(self._ways(by_api, expected), 1):
            begin(number, _CHECKS, f"{name}, {how}")
            pairs = enumerate(zip(expected, serve(), strict=True))
            compared = [compare(index, *pair) for index, pair in pairs]
            yield judged(self._expected, f"{name}, {how}", compared, self._tokenizer)

    def _ways(self, by_api: Sequence[list[Trace]], expected: Sequence[Trace]) -> Iterator[tuple[tuple[str, str], Way]]:
        """Yield (interface, how many at once) of each check, and the function that serves the requests.

        Call each function before the next check is taken: the server runs during its two checks only.
        """
        hows = {"alone": 1, f"{len(expected)} at once": len(expected)}  # in the order of `by_api`
        for how, traces in zip(hows, by_api, strict=True):
            yield ("Python API", how), partial(list, traces)
        for how, parallel in hows.items():
            yield ("batch", how), partial(self._by_batch, expected, parallel)
        key = environment.api_key()
        with server_process(self._load, key) as url:
            address = HTTPAddress(url, key)
            for how, parallel in hows.items():
                yield ("server", how), partial(self._by_server, address, expected, parallel)

    def _by_api(self, model: Model) -> list[Trace]:
        answers = [model.generate(prompt, logprobs=TOP, **self._options) for prompt in self._prompts]
        return [_trace(answer.tokens, answer.logprobs) for answer in answers]

    def _by_api_at_once(self, model: Model) -> list[Trace]:
        answers = model.batch(self._prompts, logprobs=TOP, **self._options)
        return [_trace(answer.tokens, answer.logprobs) for answer in answers]

    def _by_run(self, prompt: str) -> Trace:
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in self._options.items()]
        arguments = ["run", prompt, *self._load, "--system", "", *flags, "--json", f"--logprobs={TOP}"]
        document = json.loads(_command(arguments))
        logprobs = [TokenLogprobs(token["chosen"], token["top"]) for token in document["logprobs"]]
        return _trace(document["tokens"], logprobs)

    def _by_batch(self, expected: Sequence[Trace], parallel: int) -> list[Trace]:
        lines = [{"custom_id": str(index), "body": self._body(prompt)} for index, prompt in enumerate(self._prompts)]
        # No system prompt from the settings, and answers in the order of the prompts.
        arguments = ["batch", *self._load, "--system", "", f"--parallel={parallel}", "--in-order", "-q"]
        output = _command(arguments, "\n".join(map(json.dumps, lines)))
        bodies = [json.loads(line)["response"]["body"] for line in output.splitlines()]
        return [self._reported(*pair) for pair in zip(bodies, expected, strict=True)]

    def _by_server(self, address: HTTPAddress, expected: Sequence[Trace], parallel: int) -> list[Trace]:
        def ask(prompt: str) -> object:
            connection = address.connection(_WAIT_S)
            try:
                return json.loads(address.ask(connection, "/v1/chat/completions", self._body(prompt)).read())
            finally:
                connection.close()

        with ThreadPoolExecutor(parallel) as threads:
            return [self._reported(*pair) for pair in zip(threads.map(ask, self._prompts), expected, strict=True)]

    def _body(self, prompt: str) -> dict[str, object]:
        report = {"logprobs": True, "top_logprobs": TOP}
        return {"messages": [{"role": "user", "content": prompt}], **self._options, **report}

    def _reported(self, body: Any, expected: Trace) -> Trace:
        """Return the trace of a chat completion, whose tokens are texts.

        Their ids are those of the expected trace at the same position; -1 for a text that is not there.
        """
        try:
            reports = body["choices"][0]["logprobs"]["content"]
        except (KeyError, TypeError):
            raise EngineError(f"an answer failed: {str(body)[:300]}") from None
        trace = Trace()
        for report, chosen, logprobs in zip_longest(reports, expected.tokens, expected.logprobs):
            if report is None:  # the answer is shorter
                break
            likeliest = [] if logprobs is None else [token for token, _ in logprobs.top]
            trace.tokens.append(self._id_of(report["token"], chosen, likeliest))
            entries = report["top_logprobs"]
            top = [
                (self._id_of(entry["token"], token, likeliest), entry["logprob"])
                for entry, token in zip(entries, likeliest, strict=False)
            ]
            trace.logprobs.append(TokenLogprobs(report["logprob"], top))
        return trace

    def _id_of(self, text: str, expected: int | None, likeliest: Sequence[int]) -> int:
        """Return the token of a text: the expected one, or else the first of `likeliest` with this text, or else -1.

        Several tokens may have one text, so the expected one comes first. expected: None beyond the expected answer.
        """
        candidates = [*likeliest] if expected is None else [expected, *likeliest]
        return next((token for token in candidates if self._text_of(token) == text), -1)


def _flags(options: Mapping[str, object]) -> list[str]:
    """Return options of `api.load`, which all have the names of flags, as those flags; None and False are left out."""
    return [f"--{name}" if value is True else f"--{name}={value}" for name, value in options.items() if value]


def _trace(tokens: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> Trace:
    # JSON has lists in place of (token, log probability).
    copies = [TokenLogprobs(report.chosen, [(token, value) for token, value in report.top]) for report in logprobs]
    return Trace(tokens=list(tokens), logprobs=copies)


def _command(arguments: Sequence[str], given: str = "") -> str:
    """Return the standard output of a command. Raises EngineError if it fails."""
    command = [sys.executable, "-m", "headrace", *arguments]
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last_line = (done.stderr.strip().splitlines() or [""])[-1]
        raise EngineError(f"headrace {arguments[0]} failed: {last_line}")
    return done.stdout
