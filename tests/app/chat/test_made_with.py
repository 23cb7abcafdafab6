"""Model, settings and system prompt stored with an answer, and their display."""

from contextlib import closing
from pathlib import Path

from msgspec.structs import replace

from headrace.app.chat.conversation import Conversation
from headrace.app.sessions.export import to_document, to_markdown
from headrace.app.sessions.records import Message
from headrace.app.sessions.store import SessionStore
from headrace.app.tui.transcript.entry import Entry, LayoutOptions
from tests.support.scripted_engine import CARD, ScriptedEngine
from tests.support.summaries import make_summary


def ask(chat: Conversation, text: str) -> None:
    chat.send(text)
    while chat.phase != "idle":
        chat.poll()


def test_every_answer_stores_its_model_and_sampling(tmp_path: Path) -> None:
    with closing(SessionStore(tmp_path / "sessions.db")) as store:
        engine = ScriptedEngine(card_to_load=replace(CARD, generation_defaults={"top_p": 0.9, "temperature": 0.6}))
        chat = Conversation(engine, store, store.create(system="Be brief.", sampling={"max_tokens": 50}))
        ask(chat, "Hi")
        chat.branch.set_sampling({"temperature": 0.2, "stop": ["END"]})
        chat.branch.set_system("")
        ask(chat, "Again")
        chat.edit(chat.messages[1].id, "By hand.")
        question, first, _, second = store.messages(chat.session.id)[:4]
        assert (question.sampling, question.system) == (None, None)
        assert (first.model, first.system) == ("scripted-1b", "Be brief.")
        assert first.sampling == {"temperature": 0.6, "top_p": 0.9, "max_tokens": 50}
        assert second.sampling == {"temperature": 0.2, "top_p": 0.9, "max_tokens": 50, "stop": ["END"]}
        assert second.system == ""
        assert chat.messages[-1].sampling == first.sampling

        markdown = to_markdown(store.session(chat.session.id), [question, first, second])
        assert "<sub>scripted-1b · temperature 0.6 · top_p 0.9 · 4 tokens" in markdown
        assert "<sub>scripted-1b · temperature 0.2 · top_p 0.9 · 4 tokens" in markdown
        assert "**System prompt of this answer**\n\nBe brief." in markdown
        exported = to_document(chat.session, [first])["messages"][0]
        assert (exported["model"], exported["system"]) == ("scripted-1b", "Be brief.")
        assert exported["sampling"]["temperature"] == 0.6

        entry = Entry(first)
        assert not any("scripted-1b" in line.plain for line, _ in entry.rows(LayoutOptions(80)))
        entry.detail(True)
        details = [line.plain for line, kind in entry.rows(LayoutOptions(80)) if kind == "meta"]
        assert details[-1] == "scripted-1b · temperature 0.6 · top_p 0.9 · system prompt: Be brief."


def test_a_selected_answer_shows_all_figures_in_a_narrow_chat() -> None:
    figures = make_summary(36, 24, 355, 0.0767, 600.0, 156.0, 8.4, 0.25, 9_000_000)
    entry = Entry(Message(1, "s", None, "assistant", "So.", 0.0, finish_reason="cancelled", metrics=figures))
    cut = [line.plain for line, kind in entry.rows(LayoutOptions(40)) if kind == "meta"]
    assert len(cut) == 1
    assert cut[0].endswith("…")
    entry.detail(True)
    lines = [line.plain for line, kind in entry.rows(LayoutOptions(40)) if kind == "meta"]
    assert (
        " ".join(lines)
        == "■ stopped · 355 tokens · 156 tok/s · TTFT 76.7 ms · MBU 25 % · 24 of 36 prompt tokens cached"
    )
    assert max(map(len, lines)) <= 40


def test_an_answer_requested_while_loading_stores_the_models_sampling(tmp_path: Path) -> None:
    with closing(SessionStore(tmp_path / "sessions.db")) as store:
        chat = Conversation(ScriptedEngine(), store)
        chat.send("Hi")  # starts the engine
        while chat.phase != "idle":
            chat.poll()
        assert chat.messages[-1].sampling == {"temperature": 0.7, "min_p": 0.05}
