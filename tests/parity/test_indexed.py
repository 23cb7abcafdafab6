"""Sparse attention (DeepSeek V3.2, GLM 5, MiniMax M3) over several blocks: passes, cached prefixes, K/V on disk."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from headrace.models.architectures.read import decoder_config
from headrace.models.network.decoder import Decoder
from headrace.models.network.make_decoder import stored_kv
from headrace.models.network.stage_decoder import stage_ranges
from headrace.runtime.errors import CheckpointError, UsageError
from headrace.runtime.kv.backend import KVBackend, KVOptions
from headrace.runtime.kv.cache import KVCache, PassRow
from headrace.runtime.kv.disk import DiskStore
from headrace.runtime.ops import BLOCK, Phase, reference
from headrace.runtime.ops.kv_format import Q8
from headrace.runtime.ranks.split import Split
from tests.parity.test_mlx_lm_families import difference, logits_of_class, stock
from tests.support.kernels import FAST
from tests.support.mlx_lm_models import VOCAB, config_of, write_mlx_lm_model
from tests.support.tiny import load_decoder

pytestmark = pytest.mark.peer

PROMPT = [(7 * i * i + 3 * i + i // 5) % VOCAB for i in range(BLOCK + 42)]
OTHER = [(5 * i * i + i + 1) % VOCAB for i in range(50)]


@pytest.fixture(scope="module", params=["deepseek-v32", "glm5", "minimax-m3", "minimax-m3-flat"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mlx_lm_model(tmp_path_factory.mktemp(request.param), config_of(request.param))


@pytest.fixture(scope="module")
def network(directory: Path) -> Decoder:
    return load_decoder(directory, FAST)


def backend(network: Decoder) -> KVBackend:
    return network.kv_backend(KVOptions(256, max_running=2, keep_prefix=True, key=b"this model"))


def run(network: Decoder, kv: KVBackend, rows: list[tuple[KVCache, list[int]]], phase: Phase = "prefill") -> mx.array:
    """Return the logits (tokens of all rows, V) of one pass, whose entries are committed."""
    [made] = kv.make_passes([PassRow(cache, len(tokens), phase) for cache, tokens in rows])
    every = mx.array([[token for _, tokens in rows for token in tokens]])
    logits = network.all_logits(network.layers(network.embed(every), made))[0]
    mx.eval(logits)
    made.advance()
    for cache, tokens in rows:
        cache.commit(len(tokens))
    return logits


def in_parts(network: Decoder, kv: KVBackend, cache: KVCache, tokens: list[int], *ends: int) -> mx.array:
    """Return the logits of a prompt fed in several passes."""
    bounds = [0, *ends, len(tokens)]
    parts = [tokens[first:last] for first, last in pairwise(bounds)]
    return mx.concatenate([run(network, kv, [(cache, part)]) for part in parts])


@pytest.mark.sampled(always=["minimax-m3-flat"])  # selects blocks of keys
def test_parts_of_a_long_prompt_equal_mlx_lms(directory: Path) -> None:
    network = load_decoder(directory, reference)
    kv = backend(network)
    ours = in_parts(network, kv, kv.acquire(()), PROMPT, 3, 60, BLOCK + 1)
    assert difference(ours, logits_of_class(stock(directory), PROMPT)[0]) < 1e-5


@pytest.mark.sampled
@pytest.mark.parametrize(
    "stated",
    [
        {"indexer_types": ["full", "shared", "full", "shared"]},
        {"index_topk_pattern": "FSFS"},
        {"index_topk_freq": 2, "index_skip_topk_offset": 1},
    ],
)
def test_layers_share_the_positions_chosen_by_one_indexer(tmp_path: Path, stated: dict[str, Any]) -> None:
    config = {**config_of("glm5"), **stated, "num_hidden_layers": 4}
    directory = write_mlx_lm_model(tmp_path, config)
    network = load_decoder(directory, reference)
    peer = stock(directory)
    share_choices(peer.model.layers)
    kv = backend(network)
    ours = in_parts(network, kv, kv.acquire(()), PROMPT, 60)
    assert difference(ours, logits_of_class(peer, PROMPT)[0]) < 1e-5
    assert network.cost.kv_bytes_per_token == network.kv_shape.bytes_per_token
    assert [layer.count for layer in network.cost.kv] == [4, 2]


def share_choices(layers: Any) -> None:
    """Let every second layer of mlx-lm's class, which has an indexer in each, attend as the layer before."""
    last: list[Any] = []
    for number, layer in enumerate(layers):
        own = layer.self_attn.indexer

        def choose(*rows: Any, own: Any = own, number: int = number, **more: Any) -> Any:
            chosen = own(*rows, **more)
            if number % 2 == 0:
                last[:] = [chosen]
            return last[0]

        layer.self_attn.indexer = choose


def test_unknown_kinds_of_indexers_are_refused() -> None:
    for kinds in (["shared", "full"], ["full"], ["full", "none"], ["full", []], {}):
        with pytest.raises(CheckpointError, match="indexer_types"):
            decoder_config({**config_of("glm5"), "indexer_types": kinds})


def test_ranks_begin_with_an_indexer() -> None:
    config = decoder_config({**config_of("glm5"), "num_hidden_layers": 6, "index_topk_pattern": "FSSFSS"})
    assert config is not None
    assert stage_ranges(config, Split("pipeline", (2, 1))) == [range(3), range(3, 6)]
    with pytest.raises(UsageError):
        stage_ranges(config, Split("pipeline", (1, 2)))


def test_bits_do_not_depend_on_the_rows_of_a_pass(network: Decoder) -> None:
    kv = backend(network)
    whole, parts = kv.acquire(()), kv.acquire(())
    alone = run(network, kv, [(whole, PROMPT)])
    assert mx.array_equal(in_parts(network, kv, parts, PROMPT, 3, 60, BLOCK + 1), alone)
    drafted = run(network, kv, [(whole, [5, 6, 7])], "decode")
    steps = [run(network, kv, [(parts, [token])], "decode") for token in (5, 6, 7)]
    assert mx.array_equal(mx.concatenate(steps), drafted)
    short = kv.acquire(())
    of_short = run(network, kv, [(short, OTHER)])
    both = run(network, kv, [(whole, [9]), (short, [8])], "decode")
    again = kv.acquire(())
    assert mx.array_equal(run(network, kv, [(again, OTHER)]), of_short)
    assert mx.array_equal(run(network, kv, [(again, [8])], "decode")[0], both[1])
    assert mx.array_equal(run(network, kv, [(parts, [9])], "decode")[0], both[0])


def test_rejected_tokens_do_not_change_indexed_layers(network: Decoder) -> None:
    kv = backend(network)
    cache = kv.acquire(())
    run(network, kv, [(cache, PROMPT)])
    [made] = kv.make_passes([PassRow(cache, 3, "decode")])
    mx.eval(network.layers(network.embed(mx.array([[1, 2, 3]])), made))
    made.advance()
    cache.rollback()
    after = run(network, kv, [(cache, [4])], "decode")
    clean = kv.acquire(())
    run(network, kv, [(clean, PROMPT)])
    assert mx.array_equal(run(network, kv, [(clean, [4])], "decode"), after)


def test_a_prefix_in_memory_and_on_disk_is_that_of_a_cold_prompt(network: Decoder, tmp_path: Path) -> None:
    kv = backend(network)
    cache = kv.acquire(())
    wanted = run(network, kv, [(cache, PROMPT)])[-1]
    kv.on_prefill(cache, PROMPT)
    shared = kv.acquire(PROMPT)
    assert shared.committed == BLOCK
    assert mx.array_equal(run(network, kv, [(shared, PROMPT[BLOCK:])])[-1], wanted)
    store = DiskStore(tmp_path, 1 << 30)
    kv.store(PROMPT, store, lambda: False)
    restarted = backend(network)
    restarted.load(PROMPT, store)
    loaded = restarted.acquire(PROMPT)
    assert loaded.committed == BLOCK
    assert mx.array_equal(run(network, restarted, [(loaded, PROMPT[BLOCK:])])[-1], wanted)


def test_a_latent_is_stored_once_with_its_index_key(network: Decoder) -> None:
    shape = network.kv_shape
    if network.config.latent is None:
        pytest.skip("not of latents")
    size = network.config.latent.head_dim + 32
    assert shape.bytes_per_token == 2 * size * shape.format.dtype.size == network.cost.kv_bytes_per_token
    read = network.cost.kv_bytes_read(BLOCK) - network.cost.kv_bytes_read(BLOCK - 1)
    assert read == 2 * 32 * shape.format.dtype.size  # of the index keys alone


class Counting:
    """Stock operations that count the bytes of K/V and of index keys that attention reads."""

    name = "counting"

    def __init__(self) -> None:
        self.nbytes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(reference, name)

    def attend(self, qkv: Any, keys: mx.array, values: mx.array, offset: int, spec: Any, *rest: Any) -> Any:
        self.nbytes += (offset + 1) * (keys[:, :, :1].nbytes + values[:, :, :1].nbytes)
        return reference.attend(qkv, keys, values, offset, spec, *rest)

    def attend_heads(self, q: Any, keys: mx.array, values: mx.array, scale: float, mask: Any, *rest: Any) -> mx.array:
        seen = keys.shape[2]
        if isinstance(mask, mx.array):
            seen = int(mask.sum().item())
        self.nbytes += seen * keys[:, :, :1].nbytes
        if values is not keys:
            self.nbytes += seen * values[:, :, :1].nbytes
        return reference.attend_heads(q, keys, values, scale, mask, *rest)

    def prepare(self, weight: Any, dtype: mx.Dtype, *, exact: bool = False) -> Any:
        self.nbytes += weight.nbytes  # index keys
        return reference.prepare(weight, dtype, exact=exact)


@pytest.mark.sampled
def test_a_step_reads_what_it_attends_to(directory: Path) -> None:
    network = load_decoder(directory, reference)
    for past in (3, 11, 12, 13, 14, 15, 16, BLOCK - 1, BLOCK):
        counting = Counting()
        watched = network.with_ops(counting)  # type: ignore[arg-type]
        kv = backend(watched)
        cache = kv.acquire(())
        run(watched, kv, [(cache, PROMPT[:past])])
        counting.nbytes = 0
        run(watched, kv, [(cache, [1])], "decode")
        missing = -(past + 1) % BLOCK  # index keys are read in whole blocks
        [*_, index_keys] = network.cost.kv
        padding = missing * index_keys.count * index_keys.bytes_per_token * (index_keys.nbytes(past + 1) > 0)
        assert counting.nbytes - padding == network.cost.kv_bytes_read(past), past


def test_the_newest_block_is_read_as_far_as_it_is_full(network: Decoder) -> None:
    if network.config.latent is not None:
        pytest.skip("entries are chosen one by one")
    [*entries, index_keys] = network.cost.kv
    [sparse] = [layers for layers in entries if layers.chosen]
    size = sparse.block
    assert sparse.chosen == 12
    counts = [sparse.visible(12 + more) for more in range(size + 2)]
    assert counts == [12, *range(12 - size + 1, 13), 12 - size + 1]
    assert (index_keys.visible(12), index_keys.visible(13)) == (0, 13)


def test_packed_kv_are_refused(network: Decoder) -> None:
    with pytest.raises(UsageError):
        stored_kv(network.config, network.ops, mx.float32, Q8)
