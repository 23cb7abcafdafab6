"""One side of a comparison on the screen: who answers and how, its figures, and below them what it says."""

from collections.abc import Sequence
from dataclasses import dataclass

from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content

from headrace.app.answer.phrases import rate_digits, sampling_text
from headrace.app.chat.parallel_answer import ParallelAnswer
from headrace.app.engine.events import Event
from headrace.app.output.sanitise import sanitise
from headrace.app.sessions.records import Message
from headrace.app.tui.decode.speculation import speculation_stats
from headrace.app.tui.metrics.feed import feed, met
from headrace.app.tui.metrics.live import LiveMetrics
from headrace.app.tui.transcript.entry import MessageState
from headrace.app.tui.transcript.transcript import Transcript
from headrace.app.tui.widgets.lines import Lines, bar, spread

_BAR = 10  # cells
_BAR_FROM = 68  # cells that a bar has room in beside any figures: never on one side alone
_CLEARLY = 1.05  # times as fast: less is what one machine does from one minute to the next
_PENDING = -1  # id of the stand-in for an answer without text


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one answer, so far or in the end. None where a figure does not exist yet."""

    tokens: int = 0
    rate: float | None = None
    ttft_s: float | None = None
    mbu: float | None = None
    prompt: int = 0
    reused: int = 0


class FigureLines(Lines):
    """What a side costs: how fast, how soon, how close to the memory's limit, how full its context."""

    def __init__(self, metrics: LiveMetrics) -> None:
        super().__init__(metrics)
        self._state: tuple[str, str] = ("", "")
        self._figures = Figures()
        self._other: tuple[str, Figures] | None = None
        self._fill: tuple[int, int | None] = (0, None)

    def tell(
        self,
        state: tuple[str, str],
        figures: Figures,
        other: tuple[str, Figures] | None,
        context: tuple[int, int | None],
    ) -> None:
        """state: what it does, and the style of that. other: name and figures of the other side, once both are over.

        context: tokens in it, and its limit.
        """
        self._state, self._figures, self._other, self._fill = state, figures, other, context
        self.show(self.metrics)

    def change_key(self, metrics: LiveMetrics) -> object:  # noqa: ARG002
        return self._state, self._figures, self._other, self._fill

    def lines(self, metrics: LiveMetrics, width: int, height: int) -> Sequence[Content]:  # noqa: ARG002
        figures, (tokens, limit) = self._figures, self._fill
        rate = Content.assemble((f"{rate_digits(figures.rate)}", "bold"), (" tok/s", "$quiet"), self._ratio())
        said = Content.assemble(f"{figures.tokens:,}", (" tokens", "$quiet"))
        if (found := speculation_stats(list(metrics.steps))) is not None:  # of the answer that grows or grew here
            said = said.append(Content.assemble(f" {found.tokens / found.steps:.2f}", (" a step", "$quiet")))
        held = Content.assemble(("context ", "$quiet"), f"{tokens:,}", (f" / {limit:,}" if limit else "", "$quiet"))
        state = Content.styled(*self._state)
        if state.cell_length + rate.cell_length + 2 > width:
            rate = Content.assemble((f"{rate_digits(figures.rate)}", "bold"), (" tok/s", "$quiet"))
        return [
            spread(state, rate, width),
            self._beginning(width),
            spread(said, held, width),
        ]

    def _beginning(self, width: int) -> Content:
        """How soon it began, and how close it came to the memory's limit; in a narrow column as much as fits."""
        figures = self._figures
        word = "–" if figures.ttft_s is None else f"{figures.ttft_s:.2f} s"
        first = Content.assemble(("first word ", "$quiet"), word)
        before = Content.styled(f", {figures.reused:,} of {figures.prompt:,} read before", "$quiet")
        whole = first + before if figures.reused else first
        mbu = "–" if figures.mbu is None else f"{figures.mbu:.0%}"
        share = Content.assemble(("MBU ", "$quiet"), f"{mbu:>4}")
        if width >= _BAR_FROM:
            share = Content.assemble(share, " ", bar(figures.mbu or 0.0, _BAR, "$primary"))
        return spread(whole if whole.cell_length + share.cell_length < width else first, share, width)

    def _ratio(self) -> Content:
        """How many times as fast as the other side."""
        if self._other is None or not self._other[1].rate or self._figures.rate is None:
            return Content("")
        name, other = self._other
        ratio = self._figures.rate / (other.rate or 1.0)
        return Content.styled(f"  {ratio:.2f}x {name}", "bold $text-success" if ratio >= _CLEARLY else "$quiet")


class ComparePane(Vertical):
    """A side; `sync` brings it up to date."""

    def __init__(self, side: ParallelAnswer, first: int, known: LiveMetrics, id: str) -> None:
        """first: the messages before are of both sides, and not shown. known: what the chat knows of the machine."""
        super().__init__(id=id)
        self._known = known
        self.side, self.metrics = side, LiveMetrics()
        self._first = first
        self._card: object = None
        self._titled = ""
        self._shown: Message | None = None  # the last message, as far as it is on the screen

    def compose(self) -> ComposeResult:
        yield FigureLines(self.metrics)
        yield Transcript()

    @property
    def transcript(self) -> Transcript:
        return self.query_one(Transcript)

    @property
    def figures(self) -> Figures:
        """As stored once the answer is over, live before."""
        live, answer = self.metrics, self.side.answer
        if self.side.turn is None and answer is not None and (went := answer.metrics) is not None:
            rate = went.decode_tokens_per_second
            return Figures(went.completion_tokens, rate, went.ttft_s, went.mbu, went.prompt_tokens, went.reused_tokens)
        if self.side.turn is None or self.side.phase == "waiting":
            return Figures()
        said = live.said
        prompt = live.reused + live.prefill_total + 1  # the last one feeds the first step
        return Figures(said, live.rate_average, live.ttft_s, live.mbu_average, prompt, live.reused)

    def hear(self, event: Event) -> None:
        """Take in what the engine said of this side."""
        self._meet()
        feed(self.metrics, [event])

    def extend_last_line(self) -> bool:
        """Whether all that was added to the answer shows, without laying out more than its last line."""
        said = self.side.messages[-1] if self.side.messages else None
        if said is self._shown or not self.display or not self.transcript.display:
            return True
        if said is None or not self.transcript.extend_last_line(said):
            return False
        self._shown = said
        return True

    def sync(self, other: "ComparePane | None" = None) -> None:
        """Draw what changed. other: the pane to be compared with, where there is one."""
        self._meet()
        side = self.side
        messages = list(side.messages[self._first :])
        self._shown = side.messages[-1] if side.messages else None
        growing = side.turn is not None
        if (side.phase != "idle" or growing) and (not messages or messages[-1].role == "user"):
            messages.append(Message(_PENDING, "", None, "assistant", "", 0.0, partial=True))
        message_states = [MessageState() for _ in messages]
        if side.phase != "idle" and messages:
            message_states[-1] = MessageState(growing=True, waiting=self._doing()[0])
        self.transcript.show(messages, message_states)
        self.transcript.settle()
        limit = side.card.context_limit if side.card is not None else None
        self.query_one(FigureLines).tell(
            self._doing(),
            self.figures,
            (other.side.name, other.figures)
            if other is not None and side.phase == other.side.phase == "idle"
            else None,
            (side.context_tokens, limit),
        )
        self._entitle()

    def _meet(self) -> None:
        if self.side.card is not None and self.side.card is not self._card:
            self._card = self.side.card
            met(self.metrics, self.side.card, self._known.machine)

    def _entitle(self) -> None:
        title = self._title()
        if title != self._titled:
            self._titled = title
            self.border_title = Content(sanitise(title))

    def _title(self) -> str:
        """What stands on the frame: who answers, and how."""
        side = self.side
        name = side.card.name if side.card is not None else side.setup.model_name
        system = f" · system: {' '.join(side.setup.system.split())}" if side.setup.system else ""
        return f"{side.name} · {name} · {sampling_text(side.effective)}{system}"

    def _doing(self) -> tuple[str, str]:
        side, metrics = self.side, self.metrics
        if side.phase == "queued":
            return "… its turn comes", "$quiet"
        if side.phase == "loading":
            share = f" {metrics.load_share:.0%}" if metrics.load_share is not None else ""
            return f"◌ {sanitise(metrics.load_stage) or 'starting the engine'}{share}", "$text-accent"
        if side.phase in ("waiting", "prefill"):
            done = f": {metrics.prefill_done} of {metrics.prefill_total} tokens" if metrics.prefill_total else ""
            return f"◌ reading the prompt{done}", "$text-accent"
        if side.phase == "answering":
            return "● answering", "bold $text-success"
        if side.notice is not None:
            return f"✗ {sanitise(side.notice)}", "$text-error"
        if side.answer is None:
            return "nothing asked yet" if not side.messages else "no answer", "$quiet"
        if side.answer.finish_reason is None and not side.answer.partial:
            return "✎ edited by hand", "$quiet"
        ends = {"stop": "✓ done", "length": "▲ limit reached", "died": "✗ the engine died"}
        return ends.get(side.answer.finish_reason or "", "■ stopped"), "$quiet"
