"""A conversation that outgrows the context: nothing is dropped unless the user says so, and what was can be undone."""

from headrace.app.chat.answered_session import AnsweredSession
from headrace.app.chat.context_question import ContextChoice, ContextQuestion, context_full_notice
from headrace.app.chat.prompt import runs, summary_messages, summary_tokens
from headrace.app.chat.turn import Turn
from headrace.app.engine.client import ChatEngine
from headrace.app.engine.messages import ContextFull, Generate
from headrace.app.sessions.records import Message, Session
from headrace.app.sessions.store import SessionStore
from headrace.models.text.thinking import split_thinking
from headrace.runtime.errors import UsageError


class LeavingOut(AnsweredSession):
    """question: see `resolve`. returned: what was typed of a message that does not fit the context, for the input to
    take back.
    """

    def __init__(self, engine: ChatEngine, store: SessionStore, session: Session, context: int | None, kv: str) -> None:
        super().__init__(engine, store, session, context, kv)
        self.returned: str | None = None
        self._typed = "", ""  # content of the last message, and the text it was taken from
        self._left_out: list[tuple[int | None, str]] = []  # prompt_from and summary as they were before each change

    def resolve(self, choice: ContextChoice) -> None:
        """Answer `question`: drop the oldest turns, put a summary in their place, or go on in a new session."""
        self._idle()
        if (question := self.question) is None:
            raise UsageError("the context is not full")
        if choice == "new":
            self._begin_anew(with_last=not question.during_answer)
        elif choice == "drop":
            self._ask(question.leaf, continuing=question.during_answer, drop_oldest=True)
        else:
            self._summarise(question)

    def set_summary(self, text: str) -> None:
        """Have this sent in the place of the messages that are left out. Raises UsageError where none are."""
        self._idle()
        if not self.not_sent:
            raise UsageError("all messages are sent: there is no summary")
        self._leave_out(self.session.prompt_from, text.strip())

    def undo_leaving_out(self) -> None:
        """Take back the latest change of what is left out and of the summary; what came before this start, at once."""
        self._idle()
        if not self.not_sent and not self._left_out:
            raise UsageError("all messages are sent: there is nothing to undo")
        before, summary = self._left_out.pop() if self._left_out else (None, "")
        self.session = self.store.set_prompt_from(self.session.id, before, summary)

    def _no_room(self, turn: Turn, full: ContextFull) -> None:
        """The engine generated nothing: the prompt leaves no room for an answer."""
        self._end_turn(turn, "length")
        if turn.summarising:  # the question stays: there are other answers
            self.notice = "the older turns are too long to be summarised"
        elif turn.dropping:
            self.question = None
            self.notice = context_full_notice(full.prompt_tokens, full.limit, "the last turn alone is too long")
            self._take_back(turn.leaf)
        else:
            self._ask_what_goes(full.prompt_tokens, turn.leaf, during_answer=turn.continuing)

    def _ask_what_goes(self, tokens: int, leaf: Message, *, during_answer: bool) -> None:
        limit = self.context_limit or tokens
        turns = sum(message.role == "user" for message in self.messages[self.not_sent :])
        if turns > 1:
            self.question = ContextQuestion(tokens, limit, during_answer, leaf.id)
        else:
            summed_up = self.session.summary and self.not_sent
            why = "there is only the summary before it" if summed_up else "nothing older is left to drop"
            self.notice = context_full_notice(tokens, limit, why)
            self._take_back(leaf)

    def _take_back(self, leaf: Message) -> None:
        """A message that cannot be sent goes back to the input: left here, it would be sent with all that follow."""
        answered = any(message.parent_id == leaf.id for message in self.store.messages(self.session.id))
        if leaf.role == "user" and not answered:
            self.store.take_back(leaf)
            self.reload(leaf.parent_id)
            self.returned = self._typed[1] if self._typed[0] == leaf.content else leaf.content

    def _stop_sending(self, count: int) -> None:
        """The engine left out the first `count` of the messages it was sent."""
        first = runs(self.session, self.messages)[count][0]
        self._leave_out(first.id, self.session.summary)

    def _leave_out(self, first: int | None, summary: str) -> None:
        """Send no message before `first`, and the summary in their place; `undo_leaving_out` takes it back."""
        self._left_out.append((self.session.prompt_from, self.session.summary))
        self.session = self.store.set_prompt_from(self.session.id, first, summary)

    def _begin_anew(self, *, with_last: bool) -> None:
        if with_last:
            self._ready_to_ask()
        last, old = self.last("user"), self.session
        self.session = self.store.create(model=old.model, system=old.system, sampling=old.sampling)
        self.question = None
        self._left_out.clear()
        self.reload(None)
        if with_last:
            self._add_and_ask(None, last.content, last.attachments)

    def _summarise(self, question: ContextQuestion) -> None:
        self._ready_to_ask()
        leaf = self.message(question.leaf)
        turn = Turn(self.store, leaf, continuing=question.during_answer, summarising=True, dropping=True)
        longest = summary_tokens(self.context_limit)
        messages = summary_messages(self.session, self.messages, longest)
        self.engine.submit(Generate(turn.id, messages, max_tokens=longest, thinking=False, drop_oldest=True))
        self._turn, self.phase = turn, "summarising"

    def _summarised(self, turn: Turn, *, cancelled: bool) -> None:
        self._turn, self.phase = None, "idle"
        summary = split_thinking(turn.summary).answer.strip()
        if not cancelled and not summary:
            self.notice = "the model gave no summary"
        elif not cancelled:
            self._leave_out(self.last("user").id, summary)
            self._ask(turn.leaf.id, continuing=turn.continuing)
