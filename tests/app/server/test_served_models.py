"""The choice of models that are unloaded for another one, with engines that load at once."""

import asyncio
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace

from headrace.app.config.load_options import ModelSpec
from headrace.app.server import served_models
from headrace.app.server.engine import ServedEngine
from headrace.app.server.errors import ApiError
from headrace.app.server.installed import InstalledModel, installed_models, is_loosely, model_named
from headrace.app.server.served_models import ServedModels, memory_needed
from headrace.models.checkpoint.safetensors import open_checkpoint
from headrace.models.cost.shape_sources import shape_of_checkpoint
from headrace.runtime.errors import HeadraceError, UsageError
from headrace.runtime.machine.memory import MemoryBudget
from tests.support.patience import PATIENCE_S
from tests.support.scripted_engine import CARD
from tests.support.tiny_chat import write_chat_model

GB = 1 << 30
NAMES = ("b", "c", "d", "e")
STOPPING = ApiError(503, "the server is stopping", "stopping")


class Engine:
    """A ServedEngine without a process. Each model needs 1 GiB, and 3.5 may be used."""

    def __init__(self, name: str, log: list[str], *, is_started: bool = False) -> None:
        self.name = name
        self.log = log
        self.is_started = is_started
        self.open = 0
        self.requested_at = 0.0
        self.failure: Any = None
        self.spec = SimpleNamespace(name=name)
        self.kv_limit = 0
        self.stopping: ApiError | None = None
        cost = replace(CARD.cost, kv=[])
        machine = replace(CARD.machine, backend="metal")
        budget = MemoryBudget(4 * GB, 5 * GB // 2, 0, "recommended working set")  # 2.5 are free beside this model
        self.card = replace(
            CARD, name=name, cost=cost, weight_bytes=GB, active_memory_bytes=GB, budget=budget, machine=machine
        )

    async def load(self) -> None:
        self.is_started = True
        self.requested_at = time.monotonic()
        self.log.append(f"load {self.name}")

    async def loaded(self) -> Any:
        self.check_stopping()
        return self.card

    async def unload(self) -> None:
        self.is_started = False
        self.log.append(f"unload {self.name}")

    def limit_kv(self, total: int) -> None:
        self.kv_limit = total

    def check_stopping(self) -> None:
        if self.stopping is not None:
            raise self.stopping

    def stop(self, error: ApiError) -> None:
        self.stopping = error


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(served_models, "memory_needed", lambda _: GB)
    return []


def make(log: list[str]) -> ServedModels:
    installed = [InstalledModel(name, name, 100, GB) for name in NAMES]

    def engine(model: InstalledModel) -> ServedEngine:
        return cast(ServedEngine, Engine(model.name, log))

    return ServedModels(cast(ServedEngine, Engine("a", log, is_started=True)), engine, lambda: installed)


@pytest.mark.parametrize("kind", [HeadraceError, UsageError])
def test_an_unreadable_store_is_an_error_without_its_path(kind: type[HeadraceError], log: list[str]) -> None:
    """Requests get the error: those that name a model which is not loaded, and those that list all."""

    def installed() -> list[InstalledModel]:
        raise kind("the models in /home/ann/models cannot be read", "make /home/ann a folder")

    async def use() -> None:
        first = cast(ServedEngine, Engine("a", log, is_started=True))
        models = ServedModels(first, lambda model: cast(ServedEngine, Engine(model.name, log)), installed)
        assert await models.find("a") is first
        for request in (models.find("b"), models.listed()):
            with pytest.raises(ApiError) as caught:
                await request
            assert caught.value.status == 503
            assert "/home" not in caught.value.message

    asyncio.run(use())


def test_the_least_recently_used_model_is_unloaded(log: list[str]) -> None:
    async def use() -> None:
        models = make(log)
        for name in ("b", "c", "a", "d", "b"):
            await models.ready(name)
        assert log == ["load b", "load c", "unload b", "load d", "unload c", "load b"]

    asyncio.run(use())


def test_idle_models_are_unloaded_before_answering_ones(log: list[str]) -> None:
    async def use() -> None:
        models = make(log)
        first, _ = await models.ready("a")
        first.__dict__["open"] = 1
        for name in ("b", "c", "d"):
            await models.ready(name)
        assert log == ["load b", "load c", "unload b", "load d"]

    asyncio.run(use())


def test_loaded_models_share_the_memory_for_kv(log: list[str]) -> None:
    async def use() -> None:
        models = make(log)
        await models.ready("b")
        limits = {engine.__dict__["kv_limit"] for engine in models.engines}
        assert limits == {3 * GB // 4 - served_models.CACHE_LIMIT}

    asyncio.run(use())


def test_a_cancelled_wait_for_memory_does_not_block_others(log: list[str]) -> None:
    """Its model was about to be unloaded, so that a request for it waits behind one for another model."""

    async def use() -> None:
        models = make(log)
        engines = [(await models.ready(name))[0] for name in ("a", "b", "c")]
        for engine in engines:
            engine.__dict__["open"] = 1
        left = asyncio.ensure_future(models.ready("d"))
        await asyncio.sleep(0.1)
        others = []
        for name in ("e", "a"):
            others.append(asyncio.ensure_future(models.ready(name)))
            await asyncio.sleep(0.1)
        for name in ("b", "c"):  # the first model is the least recently used one again
            await models.ready(name)
        left.cancel()
        await asyncio.sleep(0.1)
        for engine in engines:
            engine.__dict__["open"] = 0
        async with asyncio.timeout(PATIENCE_S):
            assert [engine.name for engine, _ in await asyncio.gather(*others)] == ["e", "a"]
        assert log == ["load b", "load c", "unload a", "load e", "unload b", "load a"]

    asyncio.run(use())


def test_a_wait_for_memory_ends_with_the_server(log: list[str]) -> None:
    async def use() -> None:
        models = make(log)
        for name in ("a", "b", "c"):
            engine, _ = await models.ready(name)
            engine.__dict__["open"] = 1
        waiting = asyncio.ensure_future(models.ready("d"))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        models.stop(STOPPING)
        with pytest.raises(ApiError) as caught:
            await waiting
        assert caught.value is STOPPING

    asyncio.run(use())


@pytest.mark.parametrize("name", ["Org/Tiny", "ORG--TINY", "org/tiny"])
def test_a_model_is_found_in_any_case_of_letters(name: str) -> None:
    model = InstalledModel("org/Tiny", "org--Tiny", 1000, GB)
    assert model_named(name, [model]) is model
    assert model_named("org/other", [model]) is None


def test_a_colon_before_an_adapter_is_a_plus_sign_unless_a_model_has_that_name() -> None:
    adapted = InstalledModel("tuned+latest", "tuned+./latest", 1000, GB)
    tagged = InstalledModel("tuned:latest", "tuned:latest", 1000, GB)
    assert model_named("tuned:latest", [adapted]) is adapted
    assert model_named("Tuned:Latest", [adapted, tagged]) is tagged
    assert model_named("tuned+latest", [tagged, adapted]) is adapted


def test_a_path_with_plus_signs_is_served_with_an_adapter(tmp_path: Path) -> None:
    base = write_chat_model(tmp_path / "c++")
    [model] = installed_models([f"{base}+{tmp_path / 'lora'}"])
    assert (model.name, model.stored_as) == (f"{base}+lora", f"{base}+{tmp_path / 'lora'}")
    assert is_loosely("C++:lora", model.name)
    assert is_loosely("c+", "c+")


def test_a_model_that_is_not_loaded_has_its_context(tmp_path: Path) -> None:
    config = {"model_type": "qwen3_omni_moe", "thinker_config": {"text_config": {"max_position_embeddings": 4096}}}
    folder = write_chat_model(tmp_path / "omni")
    (folder / "config.json").write_text(json.dumps(config))
    assert [model.context for model in installed_models([str(folder)])] == [4096]


def test_adapters_of_one_name_in_two_folders_are_two_models(tmp_path: Path) -> None:
    base = write_chat_model(tmp_path / "tiny")
    names = [f"{base}+{tmp_path / folder / 'lora'}" for folder in ("x", "y")]
    models = installed_models(names)
    assert [model_named(name, models) for name in names] == models
    assert models[0].name != models[1].name


def test_needed_memory_is_that_of_weights_kv_and_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_chat_model(tmp_path / "tiny")
    monkeypatch.setattr(served_models, "working_memory", lambda _shape: 1)
    checkpoint = open_checkpoint(path)
    kv = shape_of_checkpoint(checkpoint).cost.kv_bytes(64)
    assert memory_needed(ModelSpec(str(path), context=64)) == checkpoint.nbytes + kv + 1
