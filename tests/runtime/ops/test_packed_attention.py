"""Attention over packed K/V for any shape, within the quantization error of attention over float32 K/V.

`runtime/native/tests/packed.cpp` compares with the numbers that the codes stand for; here, with the original numbers.
"""

from collections.abc import Iterator

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.runtime.ops import BLOCK, AttentionSpec, KVKind, KVStore, Pass, Phase, SequenceRows, native
from headrace.runtime.ops.kv_format import FLOAT32, K8V4, Q4, Q8, Coding, KVFormat
from tests.support.kernels import INSTRUCTION_SETS, on_instruction_set

pytestmark = pytest.mark.skipif(not native.status().available, reason="the native kernels are not built here")


@pytest.fixture(scope="module", params=INSTRUCTION_SETS)
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    yield from on_instruction_set(request.param)


def attended(kv: KVFormat, spec: AttentionSpec, qkv: mx.array, cuts: list[tuple[int, Phase]]) -> mx.array:
    """Attend for qkv (1, T, ...) of one sequence, in passes of so many rows -> (1, T, H * D)."""
    store = KVStore([KVKind(spec.window, spec.kv_heads, spec.head_dim)], kv)
    group = store.groups[0]
    length = qkv.shape[1]
    group.slabs.append(native.slab(-(-length // BLOCK), group.block_shape, kv.dtype))
    table = list(range(group.blocks))
    outs = []
    done = 0
    for count, phase in cuts:
        rows = Pass([SequenceRows(count, done, phase, [table])], store)
        outs.append(native.attend_pass([qkv[:, done : done + count]], rows, 0, spec))
        mx.eval(outs[-1])
        done += count
    return mx.concatenate(outs, axis=1)


def step(coding: Coding, largest: float) -> float:
    """Return the largest distance of neighbouring codes, for numbers up to `largest`."""
    return largest / (2 ** (coding.bits - 1) - 1) * 1.002


@settings(max_examples=25, deadline=None)
@given(
    kv=st.sampled_from([Q8, K8V4, Q4]),
    head_dim=st.integers(1, 9).map(lambda n: 16 * n),
    kv_heads=st.integers(1, 3),
    shared=st.integers(1, 6),
    prompt=st.integers(1, 300),
    answer=st.lists(st.integers(1, 5), max_size=3),
    window=st.none() | st.integers(1, 200),
    softcap=st.none() | st.just(5.0),
    seed=st.integers(0, 1000),
)
def test_packed_attention_is_within_the_quantization_error(
    instruction_set: str,
    kv: KVFormat,
    head_dim: int,
    kv_heads: int,
    shared: int,
    prompt: int,
    answer: list[int],
    window: int | None,
    softcap: float | None,
    seed: int,
) -> None:
    del instruction_set
    heads = kv_heads * shared
    spec = AttentionSpec(heads, kv_heads, head_dim, 0.02, None, window=window, softcap=softcap)
    length = prompt + sum(answer)
    qkv = mx.random.uniform(-1, 1, (1, length, (heads + 2 * kv_heads) * head_dim), key=mx.random.key(seed))
    cuts: list[tuple[int, Phase]] = [(prompt, "prefill")]
    cuts += [(count, "decode") for count in answer]
    ours = attended(kv, spec, qkv, cuts)
    theirs = attended(FLOAT32, spec, qkv, cuts)
    # Scores move by at most |q| . |error of k|, and softmax weights by twice that, relatively. The transform makes
    # numbers larger than 1, but none of these over 3.
    moved = 0.02 * head_dim * step(kv.keys, 3) / 2
    bound = 2 * moved * (1 + moved) * 2 + step(kv.values, 3) / 2 + 1e-3
    assert float(mx.abs(ours - theirs).max()) <= bound
    others: list[tuple[int, Phase]] = [(count, "prefill") for count in (prompt // 3, prompt - prompt // 3) if count]
    others += [(1, "decode")] * sum(answer)
    assert mx.array_equal(ours, attended(kv, spec, qkv, others))
