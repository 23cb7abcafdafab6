"""The workloads that speculation is measured on."""

import pytest

from headrace.app.bench.measure.workloads import KINDS, chosen_workloads, load_workloads
from headrace.runtime.errors import UsageError


def test_every_workload_is_a_conversation_that_ends_with_a_question() -> None:
    workloads = load_workloads()
    assert list(workloads) == ["edit", "quote", "code", "records", "chat", "prose"]
    for name, workload in workloads.items():
        assert workload.name == name
        assert workload.kind in KINDS
        assert workload.about
        assert 64 <= workload.max_tokens <= 512
        assert [set(message) for message in workload.messages] == [{"role", "content"}] * len(workload.messages)
        roles = [message["role"] for message in workload.messages if message["role"] != "system"]
        assert roles == ["user", "assistant"] * (len(roles) // 2) + ["user"]
        assert all(message["content"] == message["content"].strip() != "" for message in workload.messages)
        # All of them fit into 2048 tokens, whatever the tokenizer.
        assert workload.max_prompt_tokens + workload.max_tokens <= 2048


def test_workloads_are_chosen_by_name() -> None:
    assert chosen_workloads([]) == list(load_workloads().values())
    assert [workload.name for workload in chosen_workloads(["prose", "edit", "prose"])] == ["prose", "edit"]
    with pytest.raises(UsageError, match="'novel'") as raised:
        chosen_workloads(["edit", "novel"])
    assert raised.value.hint is not None
    assert "edit, quote, code, records, chat, prose" in raised.value.hint
