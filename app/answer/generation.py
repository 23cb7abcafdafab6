"""A finished answer for programs, and its value under a schema.

`Model.generate`, `agenerate` and `batch` (`app.api`) return it. Its fields are public.

Guard: tests/test_api.py.
"""

import json
from collections.abc import Mapping, Sequence
from secrets import token_hex
from typing import Any

from msgspec import Struct, field

from headrace.app.answer.answer import Answer
from headrace.app.answer.messages import tool_call
from headrace.models.text.events import TokenReport
from headrace.models.text.tools.call import ToolCall
from headrace.runtime.config.value_types import shown
from headrace.runtime.engine.request import EndedBy, Finished, FinishReason, TokenLogprobs
from headrace.runtime.metrics.telemetry import Summary
from headrace.runtime.sampling.params import SamplingParams


class Generation(Struct, frozen=True):
    """A finished answer; `str` of it is its text.

    text: all of it, thinking and its tags included.
    finished: its end, as in the `Completed` of a stream.
    sampling: as used, with the seed that gives the answer again.
    parsed: the value of an answer with a schema, an instance if the schema is a pydantic class. None without a schema,
        and for an answer of tool calls.
    calls: of tools, in order.
    message: the answer as a message of a conversation. The result of a call follows it as
        `{"role": "tool", "tool_call_id": ..., "content": text}`.
    tokens: ids of the answer.
    logprobs: log probabilities of these tokens, if `logprobs` was given.
    unchecked_tools: tools that accept any arguments, with the reason.
    reports: log probabilities with the texts of tokens.
    """

    text: str
    finished: Finished
    sampling: SamplingParams
    parsed: Any = None
    calls: tuple[ToolCall, ...] = ()
    message: Mapping[str, object] = field(default_factory=dict)
    tokens: Sequence[int] = ()
    logprobs: Sequence[TokenLogprobs] = ()
    unchecked_tools: Mapping[str, str] = field(default_factory=dict)
    reports: Sequence[TokenReport] = ()

    @property
    def reason(self) -> FinishReason:
        """`stop`, `length` or `cancelled`."""
        return self.finished.reason

    @property
    def ended_by(self) -> EndedBy:
        """The reason in detail."""
        return self.finished.ended_by

    @property
    def summary(self) -> Summary:
        return self.finished.summary

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"<headrace.Generation: {shown(self.text)}, {len(self.tokens)} tokens, ended: {self.ended_by}>"


def generation(answer: Answer, schema: object = None) -> Generation:
    """Return a finished answer. schema: the caller's. Raises EngineError for a cut answer with a schema."""
    return Generation(
        text=answer.text,
        finished=answer.end,
        sampling=answer.request.sampling,
        parsed=parsed_value(answer, schema),
        calls=tuple(answer.calls),
        message=_message(answer),
        tokens=[token for step in answer.steps for token in step.tokens],
        logprobs=[token_logprobs for step in answer.steps for token_logprobs in step.logprobs or ()],
        unchecked_tools=answer.unchecked_tools,
        reports=answer.reports,
    )


def _message(answer: Answer) -> dict[str, object]:
    """Return an answer as a message. Ids of calls are new in a conversation."""
    calls = [tool_call(f"call_{token_hex(12)}", call.name, call.arguments) for call in answer.calls]
    return {"role": "assistant", "content": answer.text} | ({"tool_calls": calls} if calls else {})


def parsed_value(answer: Answer, schema: Any) -> Any:
    """Return the value of an answer with a schema, else None. Raises EngineError for one that is not whole."""
    if schema is None or answer.calls:
        return None
    answer.check_whole()
    validate = getattr(schema, "model_validate_json", json.loads)
    return validate(answer.result)


def plain_schema(schema: Any) -> Any:
    """Return the JSON schema of a pydantic class, other schemas as they are.

    `additionalProperties` is false unless the class sets it: pydantic would drop further properties. `uniqueItems` is
    removed: pydantic merges repeated items of a set.
    """
    if not isinstance(schema, type) or not hasattr(schema, "model_json_schema"):
        return schema
    schema_document: dict[str, Any] = _without_sets(schema.model_json_schema())
    for part in (schema_document, *schema_document.get("$defs", {}).values()):
        if "properties" in part:
            part.setdefault("additionalProperties", False)
    return schema_document


def _without_sets(value: Any) -> Any:
    """Return a schema with lists that may repeat items."""
    if isinstance(value, Mapping):
        return {key: _without_sets(each) for key, each in value.items() if not (key == "uniqueItems" and each is True)}
    return [_without_sets(each) for each in value] if isinstance(value, list) else value
