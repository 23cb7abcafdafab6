"""Sessions kept in memory after a full disk are written back to their file."""

from contextlib import closing
from pathlib import Path

import pytest

from headrace.app.sessions import store as stores
from headrace.app.sessions.store import SessionStore
from headrace.runtime.errors import SessionError, UnknownSessionError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "sessions.db"


def texts(store: SessionStore, session: str) -> list[str]:
    return [message.content for message in store.branch(session)]


def test_unsaved_messages_are_merged_with_other_changes(path: Path) -> None:
    with closing(SessionStore(path)) as store:
        old = store.rename(store.create().id, "old").id
        untouched = store.create().id
        store.add(untouched, None, "user", "as it was")
        question = store.add(old, None, "user", "one")
        answer = store.begin_answer(old, question.id, "m")
        store.grow(answer.id, "half ")
        dropped = store.add(old, None, "user", "dropped")
        store.activate(answer)
        store.go_unsaved()
        with closing(SessionStore(path)) as other:  # another process takes the next ids
            theirs = other.add(untouched, other.branch(untouched)[-1].id, "user", "added elsewhere")
        store.grow(answer.id, "done")
        store.finish(answer.id, "stop")
        store.remove(dropped)
        store.activate(answer)
        follow = store.add(old, answer.id, "user", "two")
        assert follow.id == theirs.id
        new = store.create(system="Be brief.").id
        store.add(new, None, "user", "three")
        store.set_prompt_from(old, follow.id, "a summary")
        assert store.save_again()
        assert store.unsaved is None
    with closing(SessionStore(path)) as store:
        assert texts(store, old) == ["one", "half done", "two"]
        assert store.message(answer.id).finish_reason == "stop"
        assert not store.message(answer.id).partial
        assert [message.content for message in store.messages(old)] == ["one", "half done", "two"]
        session = store.session(old)
        assert (session.prompt_from, session.summary) == (session.active_leaf, "a summary")
        assert texts(store, untouched) == ["as it was", "added elsewhere"]
        assert (texts(store, new), store.session(new).system) == (["three"], "Be brief.")


def test_every_kind_of_change_is_written_back(path: Path) -> None:
    with closing(SessionStore(path)) as store:
        renamed = store.create().id
        set_up = store.create(model="a").id
        switched = store.create().id
        cut = store.create().id
        grown = store.create().id
        deleted = store.create().id
        untouched = store.create().id
        for session in (renamed, set_up, switched, cut, grown, deleted, untouched):
            first = store.add(session, None, "user", "one")
            store.add(session, first.id, "assistant", "two")
        older = store.branch(switched)[-1]
        store.add(switched, older.parent_id, "assistant", "another two")
        growing = store.begin_answer(grown, store.branch(grown)[-1].id, "m")
        store.go_unsaved()
        with closing(SessionStore(path)) as other:
            other.rename(untouched, "named elsewhere")
        store.rename(renamed, "a new name")
        store.set_model(set_up, "b")
        store.set_system(set_up, "Be brief.")
        store.set_sampling(set_up, {"temperature": 0.5})
        store.activate(older)
        store.remove(store.branch(cut)[-1])
        store.grow(growing.id, "three")
        store.delete(deleted)
        assert store.save_again()
    with closing(SessionStore(path)) as store:
        assert store.session(renamed).title == "a new name"
        changed = store.session(set_up)
        assert (changed.model, changed.system, changed.sampling) == ("b", "Be brief.", {"temperature": 0.5})
        assert texts(store, switched) == ["one", "two"]
        assert [message.content for message in store.messages(cut)] == ["one"]
        assert texts(store, grown) == ["one", "two", "three"]
        assert store.session(untouched).title == "named elsewhere"
        with pytest.raises(UnknownSessionError):
            store.session(deleted)


def test_a_disk_that_is_still_full_changes_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(SessionStore(path)) as store:
        session = store.create().id
        store.add(session, None, "user", "one")
        assert not store.save_again()  # everything is saved
        store.go_unsaved()
        store.add(session, store.branch(session)[-1].id, "user", "two")

        def full(*_arguments: object) -> None:
            raise SessionError("full")

        with monkeypatch.context() as patch:
            patch.setattr(stores, "write_back", full)
            assert not store.save_again()
        assert store.unsaved is not None
        with closing(SessionStore(path)) as other:
            assert texts(other, session) == ["one"]
        assert texts(store, session) == ["one", "two"]
        assert store.save_again()
    with closing(SessionStore(path)) as other:
        assert texts(other, session) == ["one", "two"]


def test_a_deleted_session_that_another_process_goes_on_with_stays(path: Path) -> None:
    with closing(SessionStore(path)) as store:
        talked = store.create().id
        question = store.add(talked, None, "user", "one")
        empty = store.create().id
        alone = store.create().id
        store.add(alone, None, "user", "one")
        store.go_unsaved()
        with closing(SessionStore(path)) as other:
            other.add(talked, question.id, "user", "added elsewhere")
            other.add(empty, None, "user", "begun elsewhere")
        store.set_model(empty, "m")
        for session in (talked, empty, alone):
            store.delete(session)
        assert store.save_again()
    with closing(SessionStore(path)) as store:
        assert texts(store, talked) == ["one", "added elsewhere"]
        assert texts(store, empty) == ["begun elsewhere"]
        with pytest.raises(UnknownSessionError):
            store.session(alone)


def test_a_removed_message_that_another_process_answered_stays(path: Path) -> None:
    with closing(SessionStore(path)) as store:
        session = store.create().id
        first = store.add(session, None, "user", "one")
        removed = store.add(session, first.id, "assistant", "two")
        leaf = store.add(session, removed.id, "user", "three")
        other_leaf = store.add(session, removed.id, "user", "another three")
        store.go_unsaved()
        with closing(SessionStore(path)) as other:
            theirs = other.add(session, leaf.id, "assistant", "answered elsewhere")
        store.remove(removed)
        store.add(session, first.id, "assistant", "a new two")
        assert store.save_again()
    with closing(SessionStore(path)) as store:
        assert texts(store, session) == ["one", "a new two"]
        branch = store.branch(session, theirs.id)
        assert [message.content for message in branch] == ["one", "two", "three", "answered elsewhere"]
        assert other_leaf.id not in {message.id for message in store.messages(session)}


def test_an_active_leaf_is_removed_from_a_changed_session(path: Path) -> None:
    with closing(SessionStore(path)) as store:
        session = store.create().id
        first = store.add(session, None, "user", "one")
        store.go_unsaved()
        store.remove(store.add(session, first.id, "assistant", "two"))
        store.take_back(store.add(session, first.id, "assistant", "another two"))
        assert texts(store, session) == ["one"]
        assert store.save_again()
    with closing(SessionStore(path)) as store:
        assert [message.content for message in store.messages(session)] == ["one"]
