"""Row invariance: what attention makes of a row has the same bits whatever is beside it and however that is shared out.

A prompt is cut into random chunks, decode rows are taken together and one by one, on one, two and three threads, on
every instruction set of this machine: outputs and cache entries are compared as bytes.
"""

import random
from collections.abc import Iterator
from dataclasses import replace

import mlx.core as mx
import pytest

from headrace.runtime.ops import AttentionSpec, Phase, Rope, native
from tests.kernels import INSTRUCTION_SETS, on_instruction_set

pytestmark = pytest.mark.skipif(not native.status().available, reason="the native kernels are not built here")

PROMPT = 1300  # entries: more than two chunks that are merged
SPEC = AttentionSpec(6, 2, 64, 0.125, Rope(64, 10_000 ** (mx.arange(0, 64, 2) / 64)))
SPECS = {
    "plain": SPEC,
    "window": replace(SPEC, window=300),
    "narrow window": replace(SPEC, window=40),
    "sinks": replace(SPEC, sinks=mx.array([0.5, -1.0, 3.0, 0.0, 2.0, 8.0])),
    "window and sinks": replace(SPEC, window=300, sinks=mx.array([0.5, -1.0, 3.0, 0.0, 2.0, 8.0])),
    "softcap": replace(SPEC, softcap=5.0, window=700),
    "norms, other heads": replace(SPEC, heads=7, kv_heads=1, q_norm=mx.ones(64), k_norm=mx.ones(64), window=130),
}


@pytest.fixture(autouse=True, params=INSTRUCTION_SETS)
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    yield from on_instruction_set(request.param)


def appended(spec: AttentionSpec, qkv: mx.array, passes: list[tuple[int, Phase]], dtype: mx.Dtype) -> list[bytes]:
    """What attention gives for qkv (1, N, .) in passes of these lengths and phases, and the cache it leaves."""
    shape = (1, spec.kv_heads, qkv.shape[1] + 5, spec.head_dim)
    keys, values = mx.full(shape, float("nan"), dtype), mx.full(shape, float("nan"), dtype)
    outputs, done = [], 0
    for length, phase in passes:
        out, keys, values = native.attend(qkv[:, done : done + length], keys, values, done, spec, 0, phase)
        mx.eval(out)
        outputs.append(out)
        done += length
    kept = [mx.concatenate(outputs, axis=1), keys[:, :, :done], values[:, :, :done]]
    return [bytes(memoryview(mx.contiguous(array.view(mx.uint8)))) for array in kept]  # type: ignore[arg-type]


def cut(total: int, sizes: list[int], seed: int) -> list[int]:
    """Random chunk sizes that sum to `total`; the first ones are given."""
    draw, chunks = random.Random(seed), list(sizes)
    while (left := total - sum(chunks)) > 0:
        chunks.append(min(left, draw.choice([1, 2, 3, 7, 16, 31, 64, 65, 200, 513])))
    return chunks


def projections(spec: AttentionSpec, tokens: int) -> mx.array:
    mx.random.seed(11)
    return 3 * mx.random.normal((1, tokens, (spec.heads + 2 * spec.kv_heads) * spec.head_dim))


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32], ids=["f16", "bf16", "f32"])
@pytest.mark.parametrize("name", SPECS)
def test_a_prompt_has_the_same_bits_however_it_is_cut(name: str, dtype: mx.Dtype) -> None:
    spec = SPECS[name]
    qkv = projections(spec, PROMPT)
    native.set_threads(1)
    expected = appended(spec, qkv, [(PROMPT, "prefill")], dtype)
    for seed, threads in enumerate((1, 2, 3)):
        native.set_threads(threads)
        chunks = cut(PROMPT, [[], [600, 1, 1], [1, 63, 64, 1]][seed], seed)
        assert appended(spec, qkv, [(chunk, "prefill") for chunk in chunks], dtype) == expected


@pytest.mark.parametrize("dtype", [mx.float16, mx.float32], ids=["f16", "f32"])
@pytest.mark.parametrize("name", SPECS)
def test_decode_rows_have_the_same_bits_together_and_one_by_one(name: str, dtype: mx.Dtype) -> None:
    spec = SPECS[name]
    qkv = projections(spec, 760)
    prompt: list[tuple[int, Phase]] = [(500, "prefill"), (124, "prefill")]
    native.set_threads(1)
    expected = appended(spec, qkv, [*prompt, *[(1, "decode")] * 136], dtype)
    for threads in (1, 2, 3):
        native.set_threads(threads)
        runs: list[tuple[int, Phase]] = [(length, "decode") for length in range(1, 17)]  # 136 in all
        assert appended(spec, qkv, [*prompt, *runs], dtype) == expected
