"""Messages as clients send them: nothing is refused that can be read."""

import pytest

from headrace.app.answer.messages import read_messages
from headrace.runtime.errors import UsageError

USER = {"role": "user", "content": "a"}


@pytest.mark.parametrize("strict", [False, True])
def test_fields_of_other_services_are_ignored(strict: bool) -> None:
    answer = {"role": "assistant", "content": "b", "reasoning_content": None, "reasoning": "c", "function_call": None}
    answer |= {"reasoning_details": [{"type": "reasoning.text", "text": "c"}], "provider_specific_fields": {"x": 1}}
    read = read_messages([USER, answer, {**USER, "cache_control": {"type": "ephemeral"}}], strict=strict)
    assert read == [USER, {"role": "assistant", "content": "b", "reasoning_content": "c"}, USER]


@pytest.mark.parametrize("strict", [False, True])
def test_null_is_an_empty_content(strict: bool) -> None:
    given = [USER, {"role": "assistant", "content": None}, {"role": "tool", "tool_call_id": "b", "content": None}]
    assert [message["content"] for message in read_messages(given, strict=strict)] == ["a", "", ""]


def test_a_content_that_may_be_misspelt_is_refused() -> None:
    for role in ("system", "developer", "user"):
        with pytest.raises(UsageError, match=r"messages\[1\] needs content"):
            read_messages([USER, {"role": role, "contents": "b"}], strict=True)


@pytest.mark.parametrize("strict", [False, True])
def test_calls_of_functions_as_older_clients_send_them(strict: bool) -> None:
    function = {"name": "look", "arguments": '{"at": "sea"}'}
    given = [USER, {"role": "assistant", "content": None, "function_call": function}]
    given.append({"role": "function", "name": "look", "content": "blue"})
    _, call, result = read_messages(given, strict=strict)
    assert [each["function"] for each in call["tool_calls"]] == [function]
    assert result == {"role": "tool", "name": "look", "content": "blue"}
