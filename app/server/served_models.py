"""All models of a server: the one of the start, and installed ones that requests name, within the memory.

Each model has an engine process. One model loads at a time. A model that does not fit next to the loaded ones has the
least recently used ones unloaded, once their answers have ended. Each model gets the context that it would have alone.

A request waits in `ready` for its model's stay: from the wait for room (`_admit`) through loading to unloading.
Requests share a stay, and a new one begins if the last is ending.

Guards: tests/app/server/test_served_models.py for the races, test_several_models.py with real engines.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from msgspec import Struct

from headrace.app.config.load_options import ModelSpec, kv_choice
from headrace.app.engine.model_card import ModelCard
from headrace.app.server.engine import ServedEngine
from headrace.app.server.errors import ApiError
from headrace.app.server.installed import InstalledModel, is_loosely, is_served, model_named
from headrace.models.checkpoint.safetensors import open_checkpoint
from headrace.models.cost.costs import loaded_weight_bytes, working_memory
from headrace.models.cost.shape_sources import shape_of_checkpoint
from headrace.models.loading.decoder_choice import context_length
from headrace.models.registry.resolve import resolve
from headrace.runtime.errors import HeadraceError
from headrace.runtime.machine.memory import CACHE_LIMIT, budget

_POLL_S = 0.05  # between two looks at a model whose answers have to end
_SHOWN = 8  # names in an error


class _Stay(Struct, eq=False):
    """A model's stay in memory, from the wait for room until it is unloaded."""

    engine: ServedEngine
    admission: asyncio.Task[None] | None = None
    """Makes room and loads the model; None for the model of the start."""
    waiting: int = 0
    """Requests that wait for the model."""
    is_admitted: bool = False
    """The model loads or is loaded. Before that, a stay ends when no request waits for it any more."""
    is_ending: bool = False
    """The model is about to be unloaded: further requests wait for its next stay."""


class ServedModels:
    """The engines of a server's models.

    first: the model that is loaded at the start, and answers requests that name none.
    """

    def __init__(
        self,
        first: ServedEngine,
        make: Callable[[InstalledModel], ServedEngine],
        installed: Callable[[], Sequence[InstalledModel]],
        aliases: frozenset[str] = frozenset(),
    ) -> None:
        """Serve one model, and others.

        make: returns the engine of another model, started but not loaded.
        installed: returns the models that requests may name; it reads files.
        aliases: other names of the first model; `*`: any name.
        """
        self.first = first
        self._make = make
        self._installed = installed
        self._aliases = aliases
        self._others: dict[str, ServedEngine] = {}
        self._stays = {first: _Stay(first, is_admitted=True)}
        self._loading = asyncio.Lock()
        self._capacity: int | None = None  # bytes for all models together; None: unknown
        self._is_shared = False  # several models have been loaded at a time
        first.on_unload = self._divide_memory

    @property
    def engines(self) -> list[ServedEngine]:
        """The engines of all models that were asked for, the first model's first."""
        return [self.first, *self._others.values()]

    async def ready(self, name: str | None) -> tuple[ServedEngine, ModelCard]:
        """Return the engine of a model, loaded if need be. Raises ApiError for an unknown name and a failed load."""
        engine = await self.find(name)
        engine.requested_at = time.monotonic()
        stay = self._stay(engine)
        stay.waiting += 1
        try:
            if stay.admission is not None:
                await asyncio.shield(stay.admission)
            return engine, await engine.loaded()
        finally:
            stay.waiting -= 1
            if not stay.waiting and not stay.is_admitted:
                self._drop(stay)

    async def find(self, name: str | None) -> ServedEngine:
        """Return the engine of a model, perhaps not loaded. Raises ApiError for an unknown name."""
        self.first.check_stopping()
        card = self.first.card or await self.first.loaded()
        if is_served(name, card, self._aliases - {"*"}):
            return self.first
        assert name is not None
        model = model_named(name, await self._read_installed())
        self.first.check_stopping()
        if model is not None:
            return self.first if self._is_first(model, card) else self._engine(model)
        if is_loosely(name, card.name) or "*" in self._aliases:
            return self.first
        raise await self._unknown(name)

    async def listed(self) -> list[tuple[InstalledModel, ServedEngine | None]]:
        """Return the other models that requests may name, each with its engine if it had one."""
        card = self.first.card or await self.first.loaded()
        models = await self._read_installed()
        return [(model, self._others.get(model.name)) for model in models if not self._is_first(model, card)]

    def stop(self, error: ApiError) -> None:
        """Refuse new requests with an error from now on."""
        for engine in self.engines:
            engine.stop(error)

    def cut(self) -> None:
        """End all requests with the error of `stop`."""
        for engine in self.engines:
            engine.cut()

    async def close(self) -> None:
        """End all engine processes."""
        for stay in list(self._stays.values()):
            if stay.admission is not None:
                stay.admission.cancel()
        await asyncio.gather(*(engine.close() for engine in self.engines))

    async def _read_installed(self) -> Sequence[InstalledModel]:
        """Return the models that requests may name. Raises ApiError without the path that cannot be read."""
        try:
            return await asyncio.to_thread(self._installed)
        except HeadraceError:
            message = "the installed models cannot be read; `headrace models list` on the server's machine says why"
            raise ApiError(503, message, "unavailable", retry_after=5) from None

    def _is_first(self, model: InstalledModel, card: ModelCard) -> bool:
        """Return whether a model is that of the start, which a path may name.

        The name alone is not enough with an adapter: two folders may have adapters of one name.
        """
        same_name = model.name == card.name and "+" not in model.name
        return same_name or model.stored_as == self.first.spec.name

    def _engine(self, model: InstalledModel) -> ServedEngine:
        engine = self._others.get(model.name)
        if engine is None:
            engine = self._others[model.name] = self._make(model)
            engine.on_unload = self._divide_memory
        return engine

    async def _unknown(self, name: str) -> ApiError:
        """Return the error of a name that no model has."""
        names = [self.first.name, *(model.name for model, _ in await self.listed())]
        more = ""
        if len(names) > _SHOWN:
            more = f" and {len(names) - _SHOWN} more"
        message = f"the model {name!r:.100} is not served here, only {', '.join(names[:_SHOWN])}{more}"
        return ApiError(404, message, "model_not_found", "model")

    # -- stays in memory -------------------------------------------------------------------------------------------

    def _stay(self, engine: ServedEngine) -> _Stay:
        """Return the stay of a model that further requests belong to, a new one if the last one is over."""
        stay = self._stays.get(engine)
        if stay is None or stay.is_ending or (stay.is_admitted and not engine.is_started):
            stay = self._stays[engine] = _Stay(engine)
            stay.admission = asyncio.get_running_loop().create_task(self._admit(stay))
        return stay

    def _drop(self, stay: _Stay) -> None:
        """End a stay that nobody waits for, before its model loads."""
        if stay.admission is not None:
            stay.admission.cancel()
        if self._stays.get(stay.engine) is stay:
            del self._stays[stay.engine]

    async def _admit(self, stay: _Stay) -> None:
        """Make room for a model and load it."""
        engine = stay.engine
        async with self._loading:
            if not engine.is_started:
                await self._make_room(engine)
                engine.check_stopping()
                stay.is_admitted = True
                await self._load(engine)
            stay.is_admitted = True

    async def _load(self, engine: ServedEngine) -> None:
        """Load a model. While it finds too little memory, unload others."""
        while True:
            await engine.load()
            await _settled(engine)
            out_of_memory = engine.failure is not None and engine.failure.error == "NotEnoughMemoryError"
            others = self._other_loaded(engine)
            if not others:
                self._capacity = _capacity(engine.card)
            if engine.is_started or not out_of_memory or not others:
                break
            await self._retire(_least_recent(others))
        self._divide_memory()

    async def _make_room(self, engine: ServedEngine) -> None:
        """Unload the least recently used models until another one fits."""
        for other in self._other_loaded(engine):
            await _settled(other)
        if not self._other_loaded(engine):
            return
        if self._capacity is None:
            self._capacity = _capacity(self.first.card)
        needed = await asyncio.to_thread(memory_needed, engine.spec)
        while others := self._other_loaded(engine):
            if await self._fits(needed, others):
                return
            await self._retire(_least_recent(others))

    async def _fits(self, needed: int | None, others: Sequence[ServedEngine]) -> bool:
        """Return whether a model fits next to others. needed: its bytes; None: unknown."""
        if needed is None or self._capacity is None:
            return True
        if needed + sum(map(_reserved, others)) > self._capacity:
            return False
        card = self.first.card
        if card is None or card.machine.backend != "cpu":
            return True
        now = await asyncio.to_thread(budget, card.machine)  # other programs may have come
        return now is None or needed <= now.usable

    def _other_loaded(self, engine: ServedEngine) -> list[ServedEngine]:
        return [other for other in self.engines if other is not engine and other.is_started]

    async def _retire(self, engine: ServedEngine) -> None:
        """Unload a model once its answers have ended. Requests that come meanwhile wait until it is loaded again."""
        stay = self._stays.get(engine)
        if stay is not None and not stay.is_admitted:
            stay = None  # the next one, whose requests wait anyway: an attempt to unload the model was given up
        if stay is not None:
            stay.is_ending = True
        try:
            while engine.open or (stay is not None and stay.waiting):
                engine.check_stopping()
                await asyncio.sleep(_POLL_S)
        except BaseException:  # a cancelled task, too: the model stays
            if stay is not None:
                stay.is_ending = False
            raise
        await engine.unload()

    def _divide_memory(self) -> None:
        """Let all loaded models have equal parts of the memory that their full contexts leave."""
        loaded = [(engine, engine.card) for engine in self.engines if engine.is_started and engine.card is not None]
        self._is_shared = self._is_shared or len(loaded) > 1
        if not self._is_shared or self._capacity is None or not loaded:
            return
        spare = (self._capacity - sum(_reserved(engine) for engine, _ in loaded)) // len(loaded)
        for engine, card in loaded:
            engine.limit_kv(card.cost.kv_bytes(card.context_limit) + max(0, spare - CACHE_LIMIT))


async def _settled(engine: ServedEngine) -> None:
    """Wait until a model is loaded, or cannot be."""
    with suppress(ApiError):
        await engine.loaded()


def _capacity(card: ModelCard | None) -> int | None:
    """Return the bytes for all models, from the figures of one that was loaded alone."""
    if card is None or card.budget is None:
        return None
    return card.budget.usable + max(card.weight_bytes, card.active_memory_bytes)


def _reserved(engine: ServedEngine) -> int:
    """Return the bytes of a loaded model's weights and of the K/V of one full context."""
    card = engine.card
    if card is not None:
        return card.weight_bytes + card.cost.kv_bytes(card.context_limit)
    return 0


def _least_recent(engines: Sequence[ServedEngine]) -> ServedEngine:
    """Return the least recently used model, preferably one without requests."""
    return min(engines, key=lambda engine: (engine.open > 0, engine.requested_at))


def memory_needed(spec: ModelSpec) -> int | None:
    """Return the bytes of weights, K/V of one full context, and working memory; None if they are unknown.

    Broken files and unknown architectures are for the load to report.
    """
    try:
        checkpoint = open_checkpoint(resolve(spec.name, fetch=False).path)
        shape = shape_of_checkpoint(checkpoint)
        weights = loaded_weight_bytes(checkpoint, shape)
    except HeadraceError:
        return None
    kv = kv_choice(spec.kv)
    if kv is not None and kv != "auto":
        shape = shape.with_kv(kv)
    return weights + shape.cost.kv_bytes(spec.context or context_length(checkpoint)) + working_memory(shape)
