"""`headrace run --samples N`: several answers to one prompt, decoding side by side.

They differ by their seeds alone, which count on from the first, so the first is the answer of that seed without
--samples. They are printed in that order, each as soon as it and those before it are done.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import click

from headrace.app.answer.sampling_options import chat_sampling, sampling_settings
from headrace.app.batch.answering import Asking
from headrace.app.batch.line import BadLine, Line
from headrace.app.batch.progress import ProgressLine
from headrace.app.batch.run import Batch, Tally
from headrace.app.cli.interrupts import first_interrupt_cancels
from headrace.app.cli.json_output import print_json
from headrace.app.output.sanitise import sanitise
from headrace.models.loading.load import LoadedModel
from headrace.models.text.chat_prompt import ChatPrompt
from headrace.runtime.engine.engine import Engine
from headrace.runtime.engine.request import CancelFlag
from headrace.runtime.errors import UsageError
from headrace.runtime.network import Network
from headrace.runtime.sampling.params import SEEDS, SamplingParams
from headrace.runtime.speculation.pass_costs import PassCostStore

Conversation = Sequence[Mapping[str, str]]


class Samples:
    """The answers, printed in order as they come unless `quiet`; `documents` are as a batch's results."""

    def __init__(self, count: int, *, echo: bool, before: Callable[[], None]) -> None:
        self._count = count
        self._echo = echo
        self._before = before
        self._found: dict[int, dict[str, Any]] = {}
        self._printed = 0

    @property
    def documents(self) -> list[dict[str, Any]]:
        return [self._found[number] for number in sorted(self._found)]

    def write(self, line: Line | BadLine, document: dict[str, Any]) -> None:
        if document["error"] is None:
            self._found[line.number] = document
        while self._echo and self._printed + 1 in self._found:
            self._printed += 1
            self._print(self._printed)

    def close(self) -> None:
        """Those behind one that never ended."""
        for number in sorted(self._found):
            if self._echo and number > self._printed:
                self._print(number)

    def _print(self, number: int) -> None:
        said = self._found[number]
        self._before()
        click.echo(f"--- {number} of {self._count}, seed {said['seed']} ---\n{sanitise(said['text'])}\n")


def run_samples(
    loaded: LoadedModel,
    count: int,
    asked: Conversation | str,
    options: Mapping[str, Any],
    sampling: Mapping[str, Any],
    *,
    draft: Network[Any] | None = None,
    as_json: bool,
    quiet: bool,
) -> int:
    """Answer `count` times: a conversation, or a text to continue. The exit code.

    options: max_tokens, stop, thinking, speculate. sampling: what was given of `SamplingParams`; where neither that nor
    the model says how warm, it is as in the chat. Raises UsageError for greedy decoding, and what `Engine.submit`
    raises.
    """
    settings = sampling_settings(sampling, loaded.generation_defaults)
    if "temperature" not in settings:
        settings = chat_sampling(sampling, loaded.generation_defaults)
    params = SamplingParams(**settings).with_seed()
    if params.greedy:
        raise UsageError("greedy decoding gives the same answer every time", "--samples goes with -t, such as -t 0.7")
    assert params.seed is not None
    chosen = {**options, **asdict(params)}
    lines = [
        Line(
            number=number,
            name=None,
            form="plain",
            messages=None if isinstance(asked, str) else asked,
            prompt=asked if isinstance(asked, str) else "",
            options={**chosen, "seed": (params.seed + number - 1) % SEEDS},
            digest="",
        )
        for number in range(1, count + 1)
    ]
    costs = PassCostStore(loaded.network.cost)
    engine = Engine(
        loaded.network, context_limit=loaded.context_limit, most_running=count, draft=draft, pass_costs=costs
    )
    progress = ProgressLine(quiet=quiet)
    samples = Samples(count, echo=not as_json, before=progress.before(sys.stdout))
    tally = Tally(total=count, kept=0)
    asking = Asking(loaded, ChatPrompt(loaded.tokenizer), drafted=draft is not None)
    batch = Batch(engine, asking, lines, samples, tally, count)
    cancel = CancelFlag()
    with first_interrupt_cancels(cancel):
        try:
            batch.run(cancel, progress)
        finally:
            progress.clear()
            samples.close()
    if tally.errors:
        raise tally.errors[0][1]
    if as_json:
        print_json(_document(loaded, samples.documents, params, tally))
    return 130 if tally.left else 0


def _document(
    loaded: LoadedModel, samples: Sequence[Mapping[str, Any]], params: SamplingParams, tally: Tally
) -> dict[str, Any]:
    """As described in docs/run-json.md."""
    from headrace.app.cli.run_report import sampling_document
    from headrace.app.versions import versions

    usage = [said["usage"] for said in samples]
    keys = ("text", "finish_reason", "ended_by", "seed", "timing")
    return {
        "model": loaded.name,
        "prompt_tokens": usage[0]["prompt_tokens"] if usage else None,
        "completion_tokens": tally.completion_tokens,
        "wall_s": tally.wall_s,
        "tokens_per_second": tally.tokens_per_second,
        "sampling": sampling_document(params),
        "samples": [
            {**{key: said[key] for key in keys}, "completion_tokens": used["completion_tokens"]}
            for said, used in zip(samples, usage, strict=True)
        ],
        "versions": versions(),
    }
