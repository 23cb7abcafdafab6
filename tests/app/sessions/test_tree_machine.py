"""The session store against a plain model, with random operations."""

import tempfile
from pathlib import Path
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from headrace.app.sessions.search import search
from headrace.app.sessions.store import SessionStore

texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=30)


class SessionTree(RuleBasedStateMachine):
    """`model` maps session id -> {"leaf": id, "messages": {id: {parent, role, content, partial}}}."""

    sessions = Bundle("sessions")
    messages = Bundle("messages")  # (session id, message id)
    growing = Bundle("growing")  # likewise

    @initialize()
    def open(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.store = SessionStore(Path(self.folder.name) / "sessions.db")
        self.model: dict[str, dict[str, Any]] = {}

    def teardown(self) -> None:
        self.store.close()
        self.folder.cleanup()

    @rule(target=sessions)
    def create(self) -> str:
        session = self.store.create()
        self.model[session.id] = {"leaf": None, "messages": {}}
        return session.id

    @rule(target=messages, session=sessions, text=texts)
    def first_message(self, session: str, text: str) -> tuple[str, int]:
        return self._add(session, None, "user", text)

    @rule(target=messages, below=messages, text=texts)
    def follow(self, below: tuple[str, int], text: str) -> tuple[str, int]:
        session, parent = below
        return self._add(session, parent, "user", text) if self._alive(below) else below

    @rule(target=growing, below=messages)
    def begin_answer(self, below: tuple[str, int]) -> tuple[str, int]:
        session, parent = below
        if not self._alive(below):
            return below
        answer = self.store.begin_answer(session, parent, "m")
        self._note(session, answer.id, parent, "assistant", "", partial=True)
        return session, answer.id

    @rule(answer=growing, text=texts)
    def grow(self, answer: tuple[str, int], text: str) -> None:
        if self._alive(answer):
            self.store.grow(answer[1], text)
            self.model[answer[0]]["messages"][answer[1]]["content"] += text

    @rule(target=messages, answer=consumes(growing), whole=st.booleans())
    def finish(self, answer: tuple[str, int], whole: bool) -> tuple[str, int]:
        if self._alive(answer):
            self.store.finish(answer[1], "stop" if whole else "cancelled", partial=not whole)
            self.model[answer[0]]["messages"][answer[1]]["partial"] = not whole
        return answer

    @rule(target=growing, answer=messages)
    def continue_answer(self, answer: tuple[str, int]) -> tuple[str, int]:
        if self._alive(answer):
            self.store.reopen(self.store.message(answer[1]))
            self.model[answer[0]]["messages"][answer[1]]["partial"] = True
        return answer

    @rule(message=messages)
    def switch(self, message: tuple[str, int]) -> None:
        if self._alive(message):
            self.store.activate(self.store.message(message[1]))
            below = {message[1]}
            for number, row in sorted(self.model[message[0]]["messages"].items()):
                if row["parent"] in below:
                    below.add(number)
            self.model[message[0]]["leaf"] = max(below)

    @rule(message=consumes(messages))
    def remove(self, message: tuple[str, int]) -> None:
        if not self._alive(message):
            return
        told = self.model[message[0]]
        below = {message[1]}
        for number, row in sorted(told["messages"].items()):
            if row["parent"] in below:
                below.add(number)
        parent = told["messages"][message[1]]["parent"]
        self.store.remove(self.store.message(message[1]))
        for number in below:
            del told["messages"][number]
        if told["leaf"] in below:
            kept = set() if parent is None else {parent}
            for number, row in sorted(told["messages"].items()):
                if parent is None or row["parent"] in kept:
                    kept.add(number)
            told["leaf"] = max(kept, default=None)

    @rule(session=sessions)
    def recover(self, session: str) -> None:
        if session in self.model:
            self.store.recover(session)

    @rule()
    def reopen_the_database(self) -> None:
        self.store.close()
        self.store = SessionStore(Path(self.folder.name) / "sessions.db")

    @rule(session=consumes(sessions))
    def delete(self, session: str) -> None:
        self.store.delete(session)
        self.model.pop(session, None)

    @invariant()
    def same_story(self) -> None:
        if not hasattr(self, "store"):
            return
        for session, expected in self.model.items():
            rows = {
                m.id: {"parent": m.parent_id, "role": m.role, "content": m.content, "partial": m.partial}
                for m in self.store.messages(session)
            }
            assert rows == expected["messages"]
            assert self.store.session(session).active_leaf == expected["leaf"]
            path = []
            at = expected["leaf"]
            while at is not None:
                path.append(at)
                at = rows[at]["parent"]
            assert [m.id for m in self.store.branch(session)] == path[::-1]
        listed = {entry.session.id: entry.messages for entry in self.store.sessions()}
        assert listed == {s: len(m["messages"]) for s, m in self.model.items() if m["messages"]}

    @rule()
    def the_index_agrees_with_the_messages(self) -> None:
        self.store.db.run("INSERT INTO message_index(message_index, rank) VALUES ('integrity-check', 1)")
        assert len(search(self.store, "zzzzzz")) == 0

    def _add(self, session: str, parent: int | None, role: Any, text: str) -> tuple[str, int]:
        message = self.store.add(session, parent, role, text)
        self._note(session, message.id, parent, role, text)
        return session, message.id

    def _note(self, session: str, new: int, parent: int | None, role: str, text: str, partial: bool = False) -> None:
        row = {"parent": parent, "role": role, "content": text, "partial": partial}
        self.model[session]["messages"][new] = row
        self.model[session]["leaf"] = new

    def _alive(self, message: tuple[str, int]) -> bool:
        return message[0] in self.model and message[1] in self.model[message[0]]["messages"]


TestSessionTree = SessionTree.TestCase
TestSessionTree.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)
