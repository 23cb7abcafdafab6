"""The chat's widgets, drawn from the conversation; the chat's actions work on them through it.

The poller calls `sync` with every poll, unless text alone came: `extend_last_line` draws that, or it waits for the next
layout. `sync` compares with what was drawn: a widget that shows something new has to be drawn there, and its cause has
to be in the tuple of `_follow_state`.

Guards: tests/tui/test_chat.py, test_text_flow.py and test_queue.py.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property

from textual.screen import Screen

from headrace.app.chat.commands import message_text, parse_command
from headrace.app.chat.conversation import Conversation
from headrace.app.chat.message_queue import MessageQueue
from headrace.app.engine.events import Event
from headrace.app.sessions.records import Draft, Message, joined
from headrace.app.tui.decode.machine import contention_text
from headrace.app.tui.decode.panel import DecodePanel
from headrace.app.tui.input.prompt import Prompt
from headrace.app.tui.input.search_bars import FindBar
from headrace.app.tui.screens.chat_state import ChatState
from headrace.app.tui.screens.dialogs import Choose, ask_unasked
from headrace.app.tui.screens.model_loading import ModelLoading
from headrace.app.tui.screens.notices import Chips, Notice, QueuedMessages, notice_of
from headrace.app.tui.screens.prompt_prefetch import PromptPrefetch
from headrace.app.tui.screens.welcome import welcome_lines
from headrace.app.tui.transcript.context_mark import MARK
from headrace.app.tui.transcript.shown_branch import ShownBranch
from headrace.app.tui.transcript.transcript import Transcript
from headrace.app.tui.widgets.status_bar import StatusBar
from headrace.runtime.errors import HeadraceError

_PICK_KEYS = "123456789abcdefghijklmnopqrstuvwxyz"  # of the names that `pick` offers, in order


class ChatView:
    """Brings the widgets of the chat's screen up to date with the conversation.

    queue: messages to send after the answer.
    editing: id of the message whose text is in the prompt, MARK for the summary, None outside an edit.
    asked: titles of the open questions that were asked; one that is taken out is asked again.
    """

    def __init__(self, screen: Screen[None], state: ChatState) -> None:
        self.screen = screen
        self.state = state
        self.queue = MessageQueue()
        self.editing: int | None = None
        self.prefetch = PromptPrefetch(screen, self._prefetch_prompt)
        self._edited = ""  # text of the message in the prompt, as it was
        self._draft = Draft()  # the prompt's text before the edit
        self._branch = ShownBranch()
        self._shown: Conversation | None = None  # the one on the screen; `sync` draws another as a new session
        self._loading = ModelLoading(screen, state)
        self._drawn: tuple[object, ...] = ()  # the state at the latest drawing of `_follow_state`
        self.asked: set[str] = set()
        self._marks_drafts = False  # draft tokens are shown in answers

    @property
    def conversation(self) -> Conversation:
        return self.state.conversation

    # Cached: they are asked for with every poll.

    @cached_property
    def prompt(self) -> Prompt:
        return self.screen.query_one(Prompt)

    @cached_property
    def transcript(self) -> Transcript:
        return self.screen.query_one(Transcript)

    @cached_property
    def find_bar(self) -> FindBar:
        return self.screen.query_one(FindBar)

    @cached_property
    def panel(self) -> DecodePanel:
        return self.screen.query_one(DecodePanel)

    # -- drawing ---------------------------------------------------------------------------------------------------

    def conversation_changed(self) -> None:
        """Draw another session with its draft, or the same one after it was reloaded."""
        other = self._shown is not self.conversation
        self._shown = self.conversation  # before `sync`, which calls this method for a conversation not shown
        self._branch = ShownBranch()
        self.asked.clear()
        self.editing = None
        if other:  # the unsent text, queued messages included, is stored with a session by now
            self.queue.take_back()
            self.prompt.put_draft(self.conversation.session.draft)
        elif self.queue.texts:
            self.return_queue()
        self.prompt.remember([message.content for message in self.conversation.messages if message.role == "user"])
        self.sync([])
        self.transcript.to_end()
        self.prefetch.wait_for_pause()

    def sync(self, events: Sequence[Event] = ()) -> None:
        """Draw all changes. events: those that came since the last call."""
        conversation = self.conversation
        if conversation is not self._shown:
            self.conversation_changed()
        messages = self._branch.messages(conversation)
        # Events may change the states of messages that are the same, such as the progress of a prefill.
        if events or messages != [entry.message for entry in self.transcript.entries]:
            self._show_messages(messages)
        if conversation.trimming.returned is not None:
            # A message too long for the context: it comes back before the text typed since, which can be continued.
            returned = conversation.trimming.returned
            conversation.trimming.returned = None
            self.prompt.move_cursor((0, 0))
            self.prompt.paste(returned)  # folded, if it is long
            self.prompt.move_cursor(self.prompt.document.end)
        if not self.queue.send_next(conversation):  # the answer was stopped or failed, or the message cannot be sent
            self.return_queue()
        # The parts around the transcript; only changes are drawn.
        self._show_prompt_title()
        self.prompt.show_size(conversation.unsent.counted if self.editing is None else None)
        self.screen.query_one(Chips).show(conversation.unsent if self.prompt.text else None)
        progressed = self._loading.update(events)  # first: what follows the state shows its `download`
        self._follow_state(empty=not messages)
        if progressed:
            if not messages:
                self._show_welcome()
            self._show_notice()
        self._ask_unasked()

    def _ask_unasked(self) -> None:
        """Ask the open questions, once each; not while the user types, nor over another screen."""
        questions = self.conversation.questions
        self.asked &= {question.title for question in questions}
        is_typing = bool(self.prompt.text) and self.prefetch.typing
        if is_typing or not self.screen.is_active:
            return
        question = next((question for question in questions if question.title not in self.asked), None)
        if question is not None:
            self.asked.add(question.title)
            ask_unasked(self.screen, self.state, question, self.prompt, self.sync)

    def _follow_state(self, *, empty: bool) -> None:
        """Draw keys, status, notice and queue if the state they show changed."""
        conversation = self.conversation
        # The status shows more than this: the progress of a load, for which `sync` draws it, and figures, title and
        # settings, for which the poller does. Keys, notice and queue depend on nothing else.
        drawn = (
            conversation.phase == "idle",
            self.state.engine.state,
            self.state.engine.card,
            conversation.notice,
            self.state.awaited,
            conversation.writer.repeats,
            conversation.branch.shared,
            conversation.context_limit,
            empty,
            self.editing,
            tuple(self.queue.texts),
        )
        if drawn == self._drawn:
            return
        self._drawn = drawn
        self.screen.refresh_bindings()
        self.update_status()
        self.show_notices()
        if empty:
            self._show_welcome()
        self.prefetch.wait_for_pause()

    def _show_messages(self, messages: list[Message]) -> None:
        states = self._branch.message_states(self.conversation, self.state.metrics, drafts=self._marks_drafts)
        self.transcript.show(messages, states)

    def toggle_drafts(self) -> str:
        """Mark draft tokens in the answers, or stop marking them; return the new state in words."""
        self._marks_drafts = not self._marks_drafts
        self._show_messages(self._branch.messages(self.conversation))
        if not self._marks_drafts:
            return "draft tokens are no longer marked"
        marks = "accepted green, rejected struck through"
        if any(entry.state.drafts for entry in self.transcript.entries):
            return f"draft tokens are marked: {marks}"
        return f"draft tokens will be marked ({marks}); none yet"

    def extend_last_line(self) -> bool:
        """Draw text that only extends the answer's last line; return False if a layout is needed."""
        messages = self.conversation.messages
        return bool(messages) and self.transcript.extend_last_line(messages[-1])

    def show_latest_answer(self) -> None:
        """Draw all changes and scroll to the end."""
        self.sync()
        self.transcript.to_end()

    def _show_welcome(self) -> None:
        session = self.conversation.session
        notice = self.conversation.notice
        self.transcript.welcome(*welcome_lines(self.state.engine, session, self._loading.download, notice))

    def show_notices(self) -> None:
        """Show the notice and the queued messages, fitted to the width."""
        self._show_notice()
        self.screen.query_one(QueuedMessages).show(self.queue.texts)

    def _show_notice(self) -> None:
        text, error = notice_of(self.conversation, self._loading.download, self.state.awaited)
        self.screen.query_one(Notice).show(text, error=error)

    def update_status(self) -> None:
        """Draw the status bar; the speed only where no panel shows it."""
        answered = any(message.role == "assistant" for message in self.conversation.messages)
        self.screen.query_one(StatusBar).set_status(self.state.status, with_speed=answered and not self.panel.display)

    def show_metrics(self) -> None:
        if self.panel.display:
            self.panel.show(self.state.shown_metrics, self.state.frozen is not None)

    def _show_prompt_title(self) -> None:
        """Draw the prompt's title: the meaning of Enter and Esc, and a busy CPU."""
        parts = []
        if self.editing == MARK:
            parts.append("summary: Enter keeps it, Esc leaves it")
        elif self.editing is not None:
            parts.append("editing: Enter makes a branch, Esc leaves it")
        elif self.conversation.phase != "idle":
            parts.append("answering: Esc stops")
        if (contention := self.state.metrics.contention) is not None:
            parts.append(contention_text(contention, self.prompt.size.width))
        self.prompt.show_title(" · ".join(parts))

    # -- the prompt ------------------------------------------------------------------------------------------------

    def begin_edit(self, message: Message) -> None:
        """Put a message's text into the prompt; its own text comes back after the edit."""
        if self.editing is None:  # else the prompt has the text of another edit
            self._draft = self.prompt.draft
        self.editing = message.id
        self.prompt.put(message.content)
        self._edited = self.prompt.text

    def end_edit(self) -> None:
        """End the edit, and put the text from before it back into the prompt."""
        self.editing = None
        self.prompt.put(self._draft.text)  # the prompt still has the pastes that placeholders in it stand for

    def return_queue(self) -> None:
        """Put queued messages back into the prompt, before its text."""
        self.prompt.put_before(self.queue.take_back())

    def unsent(self) -> Draft:
        """Return all unsent text: queued messages, the prompt's text, and an edit that was begun."""
        drafts = [Draft(text) for text in self.queue.texts]
        if self.editing is not None:
            drafts.append(self._draft)
        if self.editing is None or self.prompt.text != self._edited:  # an unchanged message is stored anyway
            drafts.append(self.prompt.draft)
        return joined(drafts)

    def _prefetch_prompt(self, pause: bool) -> None:
        """Count the tokens of the prompt's text. In a pause of typing, store it as unsent, and prefill it too."""
        if pause:
            with suppress(HeadraceError):  # reported when the chat is left
                self.state.keep_draft()
        elif not self.prompt.text.strip():
            return
        text = self.prompt.whole_text
        if self.editing is None and self.state.comparison is None:
            draft = ""
            if parse_command(text) is None:
                draft = message_text(text)
            prefill = pause and self.state.settings.chat.read_ahead
            self.conversation.prefetch(draft, count_only=not prefill)

    # -- dialogs ---------------------------------------------------------------------------------------------------

    def pick(self, title: str, names: Sequence[str], take: Callable[[int], None], *, always: bool = False) -> None:
        """Let the user pick a name and call `take` with its index; do not ask about one alone unless `always`."""
        if len(names) == 1 and not always:
            take(0)
            return
        keys = _PICK_KEYS.ljust(len(names))  # names beyond have a space, which is no key
        answers = [(str(index), keys[index], name) for index, name in enumerate(names)]

        def resolve(chosen: str | None) -> None:
            if chosen is not None:
                self.state.attempt(lambda: take(int(chosen)))

        self.screen.app.push_screen(Choose(title, "", answers), resolve)
