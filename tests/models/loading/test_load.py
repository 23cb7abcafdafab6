"""Loading: choice of the decoder, context limit, K/V format, and errors with figures."""

import json
import threading
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from headrace.models.architectures.read import decoder_config
from headrace.models.checkpoint.safetensors import open_checkpoint
from headrace.models.cost import shape_sources
from headrace.models.cost.costs import shape_to_run, working_memory
from headrace.models.loading import decoder_choice, load
from headrace.models.loading.decoder_choice import context_length, network_kind
from headrace.models.loading.load import LEAST_CONTEXT, choose_kv_format, load_model, load_resolved
from headrace.models.loading.recommended import generation_defaults
from headrace.models.loading.sized import Sized
from headrace.models.mlx_lm.network import MlxLmNetwork
from headrace.models.network.decoder import Decoder
from headrace.models.network.dtypes import compute_dtype
from headrace.models.registry.resolve import resolve
from headrace.models.text.tokenizer import Tokenizer
from headrace.runtime import ops
from headrace.runtime.engine.request import Request
from headrace.runtime.errors import CheckpointError, NotEnoughMemoryError, UnsupportedModelError, UsageError
from headrace.runtime.machine import memory
from headrace.runtime.machine.memory import MemoryBudget
from headrace.runtime.network import Network
from headrace.runtime.ops import native
from headrace.runtime.ops.kv_format import FLOAT16, K8V4, Q4, Q8, KVFormat
from tests.support.patience import PATIENCE_S
from tests.support.tiny import config_of, write_model
from tests.support.tiny_chat import write_byte_tokenizer, write_chat_model
from tests.support.watched import WatchedNetwork, answer

CONTEXT = 4096
FACTORS = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
LONG_ROPE = {"rope_scaling": FACTORS, "original_max_position_embeddings": 64}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_chat_model(tmp_path / "model", context=CONTEXT)


def working(directory: Path) -> int:
    """Bytes that the model takes beside weights and K/V."""
    return working_memory(shape_to_run(open_checkpoint(directory)))


def with_memory(monkeypatch: pytest.MonkeyPatch, usable: int | None) -> None:
    found = None if usable is None else MemoryBudget(total=2 * usable, free=usable, reserve=0, source="available RAM")
    monkeypatch.setattr(memory, "budget", lambda: found)


def test_slow_weights_and_a_slow_tokenizer_are_reported(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reports: list[tuple[str, int, int | None]] = []
    weights_shown = threading.Event()  # a report after all weights were read
    tokenizer_shown = threading.Event()
    read_network = load.read_network
    read_tokenizer = load._tokenizer

    def read_slowly(sized: Sized) -> Network:
        network = read_network(sized)
        held[0] += 1000
        assert weights_shown.wait(PATIENCE_S)
        return network

    def wait_for_reports(path: Path) -> Tokenizer:
        assert tokenizer_shown.wait(PATIENCE_S)
        return read_tokenizer(path)

    def progress(stage: str, done: int, total: int | None, /) -> None:
        reports.append((stage, done, total))
        if stage == "loading the tokenizer":
            tokenizer_shown.set()
        elif done:
            weights_shown.set()

    # MLX's own figure depends on earlier tests: weights of a tiny model fit into memory that theirs have left.
    held = [5000]
    monkeypatch.setattr(mx, "get_active_memory", lambda: held[0])
    monkeypatch.setattr(load, "_SLOW_S", 0.01)
    monkeypatch.setattr(load, "_EVERY_S", 0.01)
    monkeypatch.setattr(load, "read_network", read_slowly)
    monkeypatch.setattr(load, "_tokenizer", wait_for_reports)
    model = load_model(directory, name="tiny", progress=progress)
    weights = [report for report in reports if report[0] == "loading weights"]
    assert weights[-1] == ("loading weights", 1000, sum(array.nbytes for array in model.network.arrays))
    assert set(reports) - set(weights) == {("loading the tokenizer", 0, None)}


def test_a_quick_load_is_not_reported(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "_SLOW_S", PATIENCE_S)
    reports: list[str] = []
    load_model(directory, name="tiny", progress=lambda stage, _done, _total: reports.append(stage))
    assert reports == []


def test_a_loaded_model_answers(directory: Path) -> None:
    model = load_model(directory, name="tiny", context=64)
    assert (model.name, model.kind, model.context_limit) == ("tiny", "headrace", 64)
    assert len(answer(model.network, Request([1, 2, 3], max_tokens=4), model.context_limit)[0]) == 4
    assert model.generation_defaults == {"eos_token_id": 258}


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({}, "headrace"),
        ({"model_type": "olmo2"}, "headrace"),
        ({"model_type": "jamba"}, "mlx-lm"),
        ({"rope_traditional": True}, "mlx-lm"),
        ({"quantization": {"bits": 4, "group_size": 32}}, "headrace"),
        ({"quantization": {"bits": 4, "group_size": 32, "mode": "mxfp4"}}, "headrace"),
        ({"quantization": {"bits": 4, "group_size": 32, "lm_head": {"mode": "nvfp4"}}}, "headrace"),
        ({"quantization": {"bits": 4, "group_size": 32, "lm_head": {"mode": "unheard"}}}, "mlx-lm"),
    ],
)
def test_the_config_decides_between_the_decoder_and_mlx_lm(
    tmp_path: Path, changes: dict[str, object], kind: str
) -> None:
    directory = write_model(tmp_path, "llama")
    (directory / "config.json").write_text(json.dumps({**config_of("llama"), **changes}))
    assert network_kind(open_checkpoint(directory)) == kind


@pytest.mark.parametrize(
    ("changes", "length"),
    [
        ({}, 256),
        ({"max_position_embeddings": None}, 2048),
        ({"text_config": {"max_position_embeddings": 77}}, 77),
    ],
)
def test_the_context_length_is_read_from_any_of_its_keys(
    tmp_path: Path, changes: dict[str, object], length: int
) -> None:
    directory = write_model(tmp_path, "llama")
    (directory / "config.json").write_text(json.dumps({**config_of("llama"), **changes}))
    assert context_length(open_checkpoint(directory)) == length


def test_the_configuration_is_worked_out_once(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    for module in (decoder_choice, shape_sources):
        monkeypatch.setattr(module, "decoder_config", lambda config: asked.append(config) or decoder_config(config))
    load_model(directory, name="tiny")
    assert len(asked) == 1


@pytest.mark.parametrize("changes", [{}, {"rope_traditional": True}])  # our own decoder, mlx-lm's classes
def test_loading_frees_its_cached_buffers(directory: Path, changes: dict[str, object]) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, **changes}))
    model = load_model(directory, name="tiny")
    assert mx.get_cache_memory() == 0
    assert model.context_limit == CONTEXT


@pytest.mark.parametrize("name", ["llama", "qwen3-moe"])
def test_the_parts_of_a_loaded_models_step_have_its_bytes(tmp_path: Path, name: str) -> None:
    directory = write_model(tmp_path, name)
    write_byte_tokenizer(directory)
    cost = load_model(directory, name="tiny", context=64).network.cost
    parts = dict(cost.weight_parts)
    assert min(parts["attention"], parts["MLP"], parts["head"]) > 0
    assert 0.9 < sum(parts.values()) / cost.weight_bytes <= 1  # the rest are norms


def test_a_context_beyond_the_models_limit_needs_force(directory: Path) -> None:
    with pytest.raises(UsageError, match=f"{CONTEXT + 1} tokens.*{CONTEXT}$"):
        load_model(directory, name="tiny", context=CONTEXT + 1)
    assert load_model(directory, name="tiny", context=CONTEXT + 1, force=True).context_limit == CONTEXT + 1


def test_float32_throughout_where_it_is_asked_for(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def loaded() -> tuple[Network, mx.array]:
        network = load_model(directory, name="tiny", context=64).network
        watched = WatchedNetwork(network)
        answer(watched, Request(list(range(40)), max_tokens=8))
        return network, mx.concatenate(watched.logits_seen)

    monkeypatch.setenv("HEADRACE_KERNELS", "reference")
    exact, wanted = loaded()
    monkeypatch.delenv("HEADRACE_KERNELS")
    monkeypatch.setenv("HEADRACE_EXACT", "1")
    network, logits = loaded()
    assert network.cost.kv_bytes_per_token == exact.cost.kv_bytes_per_token
    assert (mx.abs(logits - wanted).max() / mx.abs(wanted).max()).item() < 1e-5
    monkeypatch.delenv("HEADRACE_EXACT")
    if native.status().available:
        assert 2 * loaded()[0].cost.kv_bytes_per_token == exact.cost.kv_bytes_per_token


def test_the_default_context_fits_memory(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = open_checkpoint(directory)
    per_token = load_model(directory, name="tiny").network.cost.kv_bytes_per_token
    needed = checkpoint.nbytes + working(directory)
    for room, limit in ((CONTEXT, CONTEXT), (CONTEXT - 1, CONTEXT - 1), (1000, 1000)):
        with_memory(monkeypatch, needed + room * per_token)
        assert load_model(directory, name="tiny").context_limit == limit
    with_memory(monkeypatch, None)  # nothing is known about this machine
    assert load_model(directory, name="tiny").context_limit == CONTEXT


@pytest.mark.parametrize("layers", [["sliding_attention", "full_attention"] * 2, ["sliding_attention"] * 4])
def test_layers_with_a_window_leave_room_for_more_context(
    layers: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"max_position_embeddings": CONTEXT, "layer_types": layers, "vocab_size": 300}
    directory = write_chat_model(tmp_path / "model", **(config_of("gpt-oss") | changes))
    cost = load_model(directory, name="tiny").network.cost
    room = cost.kv_bytes(2000)
    assert room < 2000 * cost.kv_bytes_per_token
    with_memory(monkeypatch, open_checkpoint(directory).nbytes + working(directory) + room)
    assert load_model(directory, name="tiny").context_limit == (2000 if "full_attention" in layers else CONTEXT)


def test_kv_formats_count_and_are_kept(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops.select(), "supports_packed", lambda _head_dim: True)
    plain, packed = (load_model(directory, name="tiny", kv=kv).network for kv in (FLOAT16, Q4))
    assert isinstance(plain, Decoder)
    assert isinstance(packed, Decoder)
    assert plain.kv_shape.format is ops.select().kv_format(mx.float32)
    assert packed.kv_shape.format is Q4
    assert packed.cost.kv_bytes_per_token == packed.kv_shape.bytes_per_token < plain.cost.kv_bytes_per_token
    room = plain.cost.kv_bytes(LEAST_CONTEXT)
    with_memory(monkeypatch, open_checkpoint(directory).nbytes + working(directory) + room)
    assert load_model(directory, name="tiny", kv=Q4).context_limit > load_model(directory, name="tiny").context_limit


def test_auto_is_the_best_format_in_which_the_context_fits(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops.select(), "supports_packed", lambda _head_dim: True)
    usual = ops.select().kv_format(mx.float32)
    costs = {kind: load_model(directory, name="tiny", kv=kind).network.cost for kind in (FLOAT16, Q8, K8V4, Q4)}
    beside = open_checkpoint(directory).nbytes + working(directory)

    def chosen(room: int, context: int | None = None) -> tuple[KVFormat | None, int, list[str]]:
        with_memory(monkeypatch, beside + room)
        model = load_model(directory, name="tiny", kv="auto", context=context)
        return model.kv, model.context_limit, model.notes

    assert chosen(costs[FLOAT16].kv_bytes(CONTEXT)) == (usual, CONTEXT, [])
    for before, kind in ((FLOAT16, Q8), (Q8, K8V4), (K8V4, Q4)):
        found, limit, notes = chosen(costs[before].kv_bytes(CONTEXT) - 1)
        assert (found, limit) == (kind, CONTEXT)
        assert notes == [f"K/V are stored as {kind.name}, since 4,096 tokens do not fit as f16"]
    found, limit, notes = chosen(costs[Q4].kv_bytes(2000))
    assert (found, limit) == (Q4, 2000)
    assert notes == ["K/V are stored as q4, since 4,096 tokens do not fit as f16; as q4 2,000 do"]
    assert chosen(costs[FLOAT16].kv_bytes(1000), context=1000)[0] == usual
    assert chosen(costs[FLOAT16].kv_bytes(1000), context=1001)[0] == Q8
    with_memory(monkeypatch, None)  # nothing is known about this machine
    assert load_model(directory, name="tiny", kv="auto").kv == usual


def test_auto_is_one_format_on_every_rank() -> None:
    class Smaller:
        """A rank beside one with less memory."""

        def largest(self, number: int) -> int:
            assert number == 0
            return 1

    sized: Any = lambda kind: Sized(kind, 0, ())  # noqa: E731
    rank: Any = Smaller()
    assert choose_kv_format(sized, "auto", 64, 0, rank) == (Q8, Sized(Q8, 0, ()))
    assert choose_kv_format(sized, K8V4, 64, 0, rank)[0] is K8V4


def test_auto_is_unquantized_where_nothing_else_can_be(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops.select(), "supports_packed", lambda _head_dim: False)
    cost = load_model(directory, name="tiny").network.cost
    with_memory(monkeypatch, open_checkpoint(directory).nbytes + working(directory) + cost.kv_bytes(1000))
    model = load_model(directory, name="tiny", kv="auto")
    assert (model.kv, model.context_limit, model.notes) == (ops.select().kv_format(mx.float32), 1000, [])
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "rope_traditional": True}))
    with_memory(monkeypatch, None)
    assert load_model(directory, name="tiny", kv="auto").kv is None  # mlx-lm's classes


def test_auto_quantizes_kv_of_mlx_lms_classes(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "rope_traditional": True}))
    plain, q8 = (load_model(directory, name="tiny", kv=kv).network.cost for kv in (FLOAT16, Q8))
    beside = open_checkpoint(directory).nbytes + working(directory)
    with_memory(monkeypatch, beside + plain.kv_bytes(CONTEXT))
    model = load_model(directory, name="tiny", kv="auto")
    assert (model.kv, model.context_limit, model.notes) == (None, CONTEXT, [])
    with_memory(monkeypatch, beside + q8.kv_bytes(CONTEXT))
    model = load_model(directory, name="tiny", kv="auto")
    assert model.kv is not None
    assert (model.kv.name, model.context_limit) == ("q8", CONTEXT)
    assert model.notes == ["K/V are stored as q8, since 4,096 tokens do not fit as f16"]


@pytest.mark.parametrize(
    ("changes", "kv", "reason"),
    [
        ({"rope_traditional": True}, K8V4, "mlx-lm's classes run this model"),
        ({"model_type": "phi3", **LONG_ROPE}, Q8, "LongRoPE turns keys anew"),
        ({}, Q4, "do not attend to packed heads of 32"),
    ],
    ids=["mlx-lm", "longrope", "operations"],
)
def test_kv_formats_that_a_network_cannot_store_are_refused_by_name(
    changes: dict[str, Any], kv: KVFormat, reason: str, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops.select(), "supports_packed", lambda _head_dim: False)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(UsageError, match=f"{kv.name}.*{reason}") as error:
        load_model(directory, name="tiny", kv=kv)
    assert "--kv f16" in str(error.value.hint)


def test_packed_kv_is_refused_with_exact_arithmetic(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_EXACT", "1")
    with pytest.raises(UsageError, match=r"q8.*HEADRACE_EXACT"):
        load_model(directory, name="tiny", kv=Q8)


def test_kv_of_mlx_lm_classes_limits_the_context(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "rope_traditional": True}))
    model = load_model(directory, name="tiny")
    assert (model.kind, model.context_limit) == ("mlx-lm", CONTEXT)
    per_token = model.network.cost.kv_bytes_per_token
    assert per_token > 0
    with_memory(
        monkeypatch, sum(array.nbytes for array in model.network.arrays) + working(directory) + 1000 * per_token
    )
    assert load_model(directory, name="tiny").context_limit == 1000
    before = mx.get_active_memory()
    with pytest.raises(NotEnoughMemoryError, match="1,001 tokens"):
        load_model(directory, name="tiny", context=1001)
    assert mx.get_active_memory() == before  # refused before a weight was read


def test_a_context_that_does_not_fit_is_refused_with_one_that_does(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    per_token = load_model(directory, name="tiny").network.cost.kv_bytes_per_token
    with_memory(monkeypatch, open_checkpoint(directory).nbytes + working(directory) + 1000 * per_token)
    with pytest.raises(NotEnoughMemoryError) as caught:
        load_model(directory, name="tiny", context=CONTEXT)
    assert caught.value.hint is not None
    assert "1,000" in caught.value.hint or "1000" in caught.value.hint
    assert load_model(directory, name="tiny", context=CONTEXT, force=True).context_limit == CONTEXT
    with_memory(monkeypatch, working(directory) + LEAST_CONTEXT * per_token // 2)  # not even the shortest one fits
    with pytest.raises(NotEnoughMemoryError):
        load_model(directory, name="tiny")


@pytest.mark.parametrize("content", [b"[]", b"{", b"\xff\xfe", b"[" * 100_000, bytes((32 << 20) + 1)])
def test_broken_generation_settings_are_one_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "generation_config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        generation_defaults(tmp_path)


@pytest.mark.parametrize("number", ["1e400", "-1e400", "NaN", "Infinity", "1" + "0" * 400, "1e308"])
@pytest.mark.parametrize("name", ["temperature", "top_k"])
def test_out_of_range_generation_settings_are_refused_by_name(tmp_path: Path, name: str, number: str) -> None:
    (tmp_path / "generation_config.json").write_text(f'{{"{name}": {number}}}')
    with pytest.raises(CheckpointError, match=rf"generation_config\.json.*{name}"):
        generation_defaults(tmp_path)


def test_the_hint_to_fetch_again_is_for_broken_files_only(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", "gpt-oss", changes={"swiglu_limit": 3.0})
    with pytest.raises(UnsupportedModelError, match="swiglu_limit") as sound:
        load_resolved(resolve(str(folder)))
    assert "anew" not in str(sound.value.hint)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(CheckpointError) as broken:
        load_resolved(resolve(str(folder)))
    assert "m anew" in str(broken.value.hint)


def test_long_names_in_generation_settings_are_shortened_in_errors(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"a\nb" * 2000: float("inf")}))
    with pytest.raises(CheckpointError, match=r"^generation_config\.json: (a b)+.* … .*b is out of range$") as caught:
        generation_defaults(tmp_path)
    assert len(str(caught.value)) < 600


def test_no_generation_settings_are_no_error(tmp_path: Path) -> None:
    assert generation_defaults(tmp_path) == {}


@pytest.mark.parametrize(
    ("device", "stored", "dtype"),
    [
        (mx.DeviceType.cpu, "F16", mx.float32),
        (mx.DeviceType.cpu, "BF16", mx.float32),
        (mx.DeviceType.cpu, "F32", mx.float32),
        (mx.DeviceType.gpu, "F16", mx.float16),
        (mx.DeviceType.gpu, "BF16", mx.bfloat16),
        (mx.DeviceType.gpu, "F32", mx.bfloat16),
    ],
)
def test_the_compute_dtype_follows_device_and_stored_dtype(device: mx.DeviceType, stored: str, dtype: mx.Dtype) -> None:
    assert compute_dtype(device, stored) == dtype


@pytest.mark.parametrize(
    ("config", "stored", "dtype"),
    [
        ({"model_type": "llama", "torch_dtype": "bfloat16"}, "F16", mx.bfloat16),
        ({"model_type": "llama", "dtype": "float16"}, "BF16", mx.float16),
        ({"model_type": "llama", "torch_dtype": "float32"}, "F16", mx.float16),
        ({"model_type": "gemma2", "torch_dtype": "bfloat16"}, "F16", mx.bfloat16),
        ({"model_type": "gemma3_text", "torch_dtype": "float16"}, "F16", mx.bfloat16),
        ({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}}, "F16", mx.bfloat16),
        ({"model_type": "llava", "text_config": {"torch_dtype": "bfloat16"}}, "F16", mx.bfloat16),
    ],
)
def test_a_gpu_computes_in_the_configs_dtype(config: dict[str, Any], stored: str, dtype: mx.Dtype) -> None:
    assert compute_dtype(mx.DeviceType.gpu, stored, config) == dtype
    assert compute_dtype(mx.DeviceType.cpu, stored, config) == mx.float32


@pytest.mark.parametrize("declared", ["float16", "bfloat16"])
def test_mlx_lms_classes_compute_in_it_too(tmp_path: Path, declared: str) -> None:
    directory = write_model(tmp_path, "llama", dtype=mx.float16 if declared == "bfloat16" else mx.bfloat16)
    (directory / "config.json").write_text(json.dumps({**config_of("llama"), "torch_dtype": declared}))
    network = MlxLmNetwork(open_checkpoint(directory), device=mx.DeviceType.gpu)
    assert {array.dtype for array in network.arrays} == {getattr(mx, declared)}
