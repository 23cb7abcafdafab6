"""Model picker: installed models and the catalog, fit in memory, speed, downloads.

The speed is the limit of a step by measured bandwidth and arithmetic, with DEFAULT_CONTEXT tokens in the cache.

    model_rows (in a thread: reads store and catalog) -> _fill: rows that match the filter, as many columns as fit

A new column is a row of `_COLUMNS` and a fact in the same place of `_line`.
tests/tui/screens/test_models_screen.py guards this.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

from msgspec import Struct
from textual.app import App
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.widget import Widget
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from headrace.app.chat.download_plan import DownloadPlan, download_plan
from headrace.app.engine.model_card import ModelCard
from headrace.app.output.sanitise import sanitise
from headrace.app.predict import DEFAULT_CONTEXT
from headrace.app.predict.uses import STAR, USES
from headrace.app.tui.input.fields import Field
from headrace.app.tui.metrics.facts import MachineFacts
from headrace.app.tui.screens.chat_state import ChatState
from headrace.app.tui.screens.dialogs import confirm, is_open
from headrace.app.tui.screens.list_screen import ListScreen
from headrace.app.tui.textual_overrides.option_list import PagedOptionList
from headrace.models.registry.catalog import squashed
from headrace.runtime.errors import HeadraceError
from headrace.runtime.metrics.cost import StepCost, step_limit
from headrace.runtime.metrics.units import format_bytes, three_digits

_SPEED = "tok/s ≤"
_SPEED_IS = f"tok/s: at most, computed with {DEFAULT_CONTEXT:,} tokens in the cache"


class _FixedColumn(NamedTuple):
    """A column beside the name.

    title: in the head.
    cells: with the gap before it.
    side: alignment, left or right.
    """

    title: str
    cells: int
    side: Literal["<", ">"]


# Dropped from the right where they do not fit. `_line` has the facts in this order.
_COLUMNS = (
    _FixedColumn("size", 9, ">"),
    _FixedColumn("memory", 10, ">"),
    _FixedColumn("fits", 9, "<"),
    _FixedColumn(_SPEED, 8, ">"),
    _FixedColumn("context", 9, ">"),
    _FixedColumn("weights", 9, "<"),
    _FixedColumn("licence", 14, "<"),
)
_FIRST_COLUMNS = sum(column.cells for column in _COLUMNS[:5])  # cells of those that go before a long name
_LONGEST_NAME = 40  # cells
_SHORTEST_NAME = 12  # cells
_MARK = 2  # cells of the mark before a name
_BAR = 24  # cells of a download's progress
_DEFAULT = " default"


class ModelRow(Struct, frozen=True):
    """One model.

    name: as `-m` takes it.
    title: its full name.
    installed: it is on this disk; else it can be downloaded.
    is_default: it is the model that runs without a name.
    bytes: on disk, or to download.
    memory_bytes: with its cache; None if unknown.
    context: limit in tokens; None if unknown.
    context_fits: contexts that fit into memory; empty if the machine's memory is unknown.
    quantization, licence: texts of the catalog or the files; empty if unknown.
    fits: into memory; None if the machine's memory is unknown.
    tokens_per_second: at most; None if unknown.
    problem: reason for which it cannot be used.
    recommended_for: uses for which it is the catalog's best on this machine.
    program: the program that keeps it, or the hub's cache; empty for headrace's own and those to download.
    """

    name: str
    title: str
    installed: bool
    is_default: bool
    bytes: int
    memory_bytes: int | None
    context: int | None
    context_fits: str
    quantization: str
    licence: str
    fits: bool | None
    tokens_per_second: float | None
    problem: str | None
    recommended_for: tuple[str, ...] = ()
    program: str = ""


def model_rows(card: ModelCard | None, machine: MachineFacts) -> list[ModelRow]:
    """Return installed models, those of other programs, and the rest of the catalog. Reads files: call it in a thread.

    card: of the loaded model.
    machine: its bandwidth and arithmetic are measured after the first load.
    """
    from headrace.app.model_info.kv_fits import fits_text
    from headrace.app.model_info.model_report import foreign_documents, overview
    from headrace.app.predict.recommend import recommended_uses
    from headrace.models.registry.catalog import load_catalog
    from headrace.models.registry.hub_cache import cached_models
    from headrace.models.registry.store import Store

    usable = None
    uses: dict[str, list[str]] = {}
    if card is not None and card.budget is not None:
        usable = card.budget.usable + card.active_memory_bytes
        uses = recommended_uses(card.machine, usable)
    costs: dict[str, StepCost | None] = {}
    if card is not None:
        costs[card.name] = card.cost
    # Models of the catalog are compared by its facts, as in `headrace fit`, the loaded one included.
    costs |= {entry.name: entry.step_shape.cost for entry in load_catalog().values()}
    store = Store()
    documents = overview(store, usable)
    num_installed = sum(document["installed"] for document in documents)
    documents[num_installed:num_installed] = foreign_documents(store, cached_models())
    rows = []
    for document in documents:
        program = str(document.get("program") or "")
        is_here = document["installed"] or bool(program)
        size = document["disk_bytes"] if is_here else document["download_bytes"]
        memory = document["memory_bytes"]
        rows.append(
            ModelRow(
                name=document["name"],
                title=str(document.get("title") or ""),
                installed=is_here,
                is_default=document["default"],
                bytes=size,
                memory_bytes=memory,
                context=document["context"],
                context_fits=fits_text(document["context_fits"], document["context"]),
                quantization=document["quantization"] or "",
                licence=str(document.get("licence") or ""),
                fits=None if memory is None or usable is None else memory <= usable,
                tokens_per_second=_most(costs.get(document["name"]), size, document["context"], machine),
                problem=document.get("problem"),
                recommended_for=tuple(uses.get(document["name"], ())),
                program=program,
            )
        )
    return rows


def _most(cost: StepCost | None, size: int, longest: int | None, machine: MachineFacts) -> float | None:
    """Return the most tokens per second; None if it is unknown.

    cost: None outside the catalog: all bytes are read.
    size: bytes on disk.
    longest: context of the model, in tokens; None if unknown.
    """
    nbytes = size
    flops = 0
    if cost is not None:
        context = min(DEFAULT_CONTEXT, longest - 1) if longest else DEFAULT_CONTEXT
        nbytes = cost.step_bytes(context)
        flops = cost.step_flops(context)
    if not machine.measured_gb_s or not nbytes:
        return None
    return 1 / step_limit(nbytes, flops, machine.measured_gb_s * 1e9, machine.flops_per_second).seconds


class ModelsScreen(ListScreen[str | None]):
    """Enter returns an installed model, or asks whether to download one. Typing filters the list.

    Downloads outlive the screen.
    """

    HEADING = "models"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "take", "Use or download", priority=True),
        Binding("ctrl+d,delete", "cancel_pull", "Stop download", key_display="^D", priority=True),
        Binding("escape,f5", "dismiss(None)", "Close", key_display="Esc", priority=True),
    ]

    def __init__(self, state: ChatState) -> None:
        super().__init__()
        self._state = state
        self._rows: list[ModelRow] = []
        self._failed: dict[str, str] = {}  # downloads whose failure the list shows
        self._matching: list[ModelRow] = []  # rows that the filter leaves, as listed
        self._card: ModelCard | None = None
        self._machine = state.metrics.machine

    def parts(self) -> Iterator[Widget]:
        yield Field(placeholder="type to filter", id="filter")
        yield Static(id="model-head")
        yield PagedOptionList(Option(Content("reading the catalog …"), disabled=True), id="models")
        yield Static(id="fits", markup=False)
        yield Static(id="pull", markup=False)

    def on_mount(self) -> None:
        self.query_one(Field).focus()
        self._load()
        self.set_interval(0.5, self._follow)

    def _load(self) -> None:
        """Read the store and the catalog in a thread."""
        card = self._state.engine.card
        machine = self._state.metrics.machine
        self._card = card
        self._machine = machine

        def read() -> None:
            try:
                rows = model_rows(card, machine)
            except (HeadraceError, OSError) as error:  # a disk that has gone away
                self.app.call_from_thread(self._state.notify, str(error), problem=True)
                return
            self.app.call_from_thread(self._fill, rows)

        self.run_worker(read, thread=True)

    def on_resize(self) -> None:
        self.call_after_refresh(self._fill, self._rows)

    def on_input_changed(self) -> None:
        self.options.highlighted = None  # the first match is highlighted
        self._fill(self._rows)

    def _fill(self, rows: list[ModelRow]) -> None:
        """Fill the list with as many columns as fit."""
        if not is_open(self) or not rows:
            return
        highlighted = self.options.highlighted
        self._rows = rows
        self._failed = dict(self._state.failed_pulls)
        self._matching = _matching(rows, self.words)
        current = self._state.metrics.model.name
        width = max(20, self.options.scrollable_content_region.width - 1)
        longest = max(len(sanitise(row.name)) + len("".join(_marks(row))) for row in rows)
        # Names get the room that the first columns leave; the other columns get what long names leave.
        max_name_cells = min(_LONGEST_NAME, longest + 1)
        name_cells = max(_SHORTEST_NAME, min(max_name_cells, width - _MARK - _FIRST_COLUMNS))
        shown = 0
        room = width - _MARK - name_cells
        while shown < len(_COLUMNS) and _COLUMNS[shown].cells <= room:
            room -= _COLUMNS[shown].cells
            shown += 1
        name_cells = min(max_name_cells, name_cells + room)
        subtitle = ""
        if any(column.title == _SPEED for column in _COLUMNS[:shown]):
            subtitle = _SPEED_IS
        self.query_one(".dialog").border_subtitle = Content(subtitle)
        # The head, then a line for each model.
        titles = [column.title for column in _COLUMNS]
        head = Content.assemble(f"{'':{_MARK}}{'model':<{name_cells}}", *_cells(titles, shown))
        self.query_one("#model-head", Static).update(Content.styled(head.plain, "$quiet"))
        options = []
        for row in self._matching:
            line = _line(row, self._failed.get(row.name), row.name == current, name_cells, shown)
            options.append(Option(line.truncate(width, ellipsis=True), id=row.name, disabled=bool(row.problem)))
        if highlighted is None or highlighted >= len(self._matching):
            highlighted = next((index for index, row in enumerate(self._matching) if not row.problem), 0)
        self.set_options(options, "no model has this in its name", marked=highlighted)
        self._show_detail()

    def on_option_list_option_highlighted(self) -> None:
        self._show_detail()

    def _show_detail(self) -> None:
        """Show why the highlighted model's download failed, or the context lengths that fit in memory by K/V format."""
        highlighted = self.options.highlighted
        line = self.query_one("#fits", Static)
        line.display = False
        if highlighted is not None and highlighted < len(self._matching):
            row = self._matching[highlighted]
            if failure := self._failed.get(row.name):
                line.display = True
                hint = ("; Enter tries again", "$quiet")
                line.update(Content.assemble(("✗ ", "$text-error"), sanitise(failure), hint))
            elif row.context_fits:
                line.display = True
                uses = ""
                if row.recommended_for:
                    uses = f" · {STAR} {', '.join(USES[use] for use in row.recommended_for)}"
                fits = ("context that fits: ", "$quiet")
                line.update(Content.assemble(fits, row.context_fits, (uses, "$text-success")))
        self.call_after_refresh(self.fit)  # a reason may take several lines

    def _follow(self) -> None:
        """Reload the list after a model was loaded or the machine was measured; show downloads and their failures."""
        if self._state.engine.card is not self._card or self._state.metrics.machine != self._machine:
            self._load()
        elif self._state.failed_pulls != self._failed:
            self._fill(self._rows)
        self._show_pull()

    def _show_pull(self) -> None:
        """Show the progress of a download; reload the list after it."""
        line = self.query_one("#pull", Static)
        pulls = self._state.pulls
        if line.display != bool(pulls):
            self.refresh_bindings()
        if not pulls:
            if line.display:
                line.display = False
                self._load()
            return
        pull = next(iter(pulls.values()))
        size = format_bytes(pull.done)
        cells = 0
        if pull.total:
            size += f" of {format_bytes(pull.total)}"
            cells = round(pull.done / pull.total * _BAR)
        line.display = True
        line.update(
            Content.assemble(
                (f"{sanitise(pull.name)}: {pull.stage} ", "bold"),
                ("━" * cells, "$accent"),
                ("─" * (_BAR - cells), "$faint"),
                f" {size}",
            )
        )

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        if event.option_index >= len(self._matching):  # chosen before the filter changed the list
            return
        row = self._matching[event.option_index]
        if row.problem:  # likewise: the option that was chosen had none
            return
        if row.installed:
            self.dismiss(row.name)
            return
        try:
            wanted = download_plan(row.name)
        except HeadraceError as error:
            self._state.show_error(error)
            return
        if wanted is None:  # somebody else has fetched it meanwhile
            self._load()
        else:
            ask_to_fetch(self.app, wanted, lambda: self._pull(row), fits=row.fits)

    def _pull(self, row: ModelRow) -> None:
        if self._state.attempt(lambda: self._state.engine.pull(row.name)):
            self._state.notify(f"downloading {row.name}, {format_bytes(row.bytes)}, in the background")

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:  # noqa: ARG002
        return action != "cancel_pull" or bool(self._state.pulls)

    def action_take(self) -> None:
        self.options.action_select()

    def action_cancel_pull(self) -> None:
        self._state.engine.cancel_pull()


def ask_to_fetch(app: App[Any], wanted: DownloadPlan, then: Callable[[], object], *, fits: bool | None = None) -> None:
    """Ask whether to download or copy a model, and call `then` after a yes. fits: in memory; None: unknown."""
    facts = [f"{wanted.download}; {wanted.room}."]
    if fits is False:
        facts.append("It does not fit in this machine's memory.")
    confirm(app, sanitise(f"{wanted.verb} {wanted.name}?"), sanitise(" ".join(facts)), wanted.verb, then)


def _line(row: ModelRow, failure: str | None, current: bool, name_cells: int, shown: int) -> Content:
    """Return a model's line. ● loaded, ✓ installed, ↓ can be downloaded, ✗ with a problem or a failed download.

    row: the model.
    failure: the reason of the latest download's failure; None: it did not fail.
    current: it is the loaded model.
    name_cells: room for its name.
    shown: number of `_COLUMNS`.
    """
    if reason := row.problem or failure:
        return Content.assemble(("✗ ", "$text-error"), f"{sanitise(row.name)}  {sanitise(reason)}")
    if current:
        mark = ("●", "bold $text-success")
    elif row.installed:
        mark = ("✓", "$text-success")
    else:
        mark = ("↓", "$quiet")
    fits = {True: ("yes", "$text-success"), False: ("too big", "$text-error"), None: ("?", "$quiet")}[row.fits]
    star, default = _marks(row)
    name = Content.assemble(
        (sanitise(row.name), "bold" if row.installed else ""),
        (star, "$text-success"),
        (default, "$quiet"),
    )
    facts: list[str | Content] = [
        format_bytes(row.bytes),
        format_bytes(row.memory_bytes),
        Content.styled(*fits),
        three_digits(row.tokens_per_second),
        f"{row.context:,}" if row.context else "–",
        Content.styled(sanitise(row.quantization) or "–", "$quiet"),
        Content.styled(sanitise(row.licence) or "–", "$quiet"),
    ]
    return Content.assemble(mark, " ", name.truncate(name_cells, ellipsis=True, pad=True), *_cells(facts, shown))


def _marks(row: ModelRow) -> tuple[str, str]:
    """Return the texts after a model's name: of a recommended one, and of the default or of another program's."""
    star = f" {STAR}" if row.recommended_for else ""
    if row.program:
        return star, f" in {row.program}"
    return star, _DEFAULT if row.is_default else ""


def _matching(rows: Sequence[ModelRow], words: str) -> list[ModelRow]:
    """Return the rows with all words in their name, title or uses, spelled with or without dashes."""
    texts = [(row, squashed(" ".join((row.name, row.title, *row.recommended_for)))) for row in rows]
    return [row for row, text in texts if all(squashed(word) in text for word in words.split())]


def _cells(texts: Sequence[str | Content], shown: int) -> list[Content]:
    """Return the first `shown` texts, each padded to its column."""
    made = []
    for text, (_, cells, side) in zip(texts[:shown], _COLUMNS, strict=False):
        content = text if isinstance(text, Content) else Content(text)
        if side == ">":
            made.append(Content.assemble(" " * (cells - content.cell_length), content))
        else:
            made.append(Content.assemble("  ", content.truncate(cells - 2, ellipsis=True, pad=True)))
    return made
