"""Every sampling stage against a second implementation in plain Python."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from msgspec.structs import replace

from headrace.runtime.errors import UsageError
from headrace.runtime.ops import native, select
from headrace.runtime.sampling.params import MAX_MAGNITUDE, SamplingParams
from headrace.runtime.sampling.sampler import Sampler, choose, logprobs, split_key

VOCAB = 12
DRAWS = 500
logit = st.floats(-6, 6).map(lambda value: round(value, 2))
rows = st.lists(logit, min_size=VOCAB, max_size=VOCAB, unique=True)
tokens = st.integers(0, VOCAB - 1)


needs_native = pytest.mark.skipif(not native.status().available, reason="needs the native kernels")


@pytest.fixture(scope="module", autouse=True, params=[pytest.param("native", marks=needs_native), "reference"])
def _kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run everything on both operations."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("HEADRACE_KERNELS", raising=False)
        if request.param == "reference":
            patch.setenv("HEADRACE_KERNELS", "reference")
        yield


def penalised(logits: Sequence[float], params: SamplingParams, prompt: list[int], output: list[int]) -> list[float]:
    """Return logits after bias and penalties."""
    out = list(logits)
    counts = Counter(output)
    for token, bias in params.logit_bias.items():
        out[token] += bias
    for token in {*prompt, *output}:
        penalty = params.repetition_penalty
        out[token] = out[token] / penalty if out[token] > 0 else out[token] * penalty
    for token, times in counts.items():
        out[token] -= params.presence_penalty + params.frequency_penalty * times
    return out


def distribution(logits: list[float], params: SamplingParams) -> dict[int, float]:
    """Temperature, then top-k, top-p and min-p, each on the renormalised rest. Token -> probability."""
    scaled = {token: value / params.temperature for token, value in enumerate(logits)}
    kept = sorted(scaled, key=lambda token: -scaled[token])
    assume(all(scaled[a] - scaled[b] > 1e-3 for a, b in pairwise(kept)))  # which of two equals is cut is open
    if params.top_k:
        kept = kept[: params.top_k]
    if params.top_p < 1:
        mass = 0.0
        nucleus = []
        for token in kept:
            assume(abs(mass - params.top_p) > 1e-4)  # float32 may see the edge differently
            if mass >= params.top_p:
                break
            nucleus.append(token)
            mass += normalised(scaled, kept)[token]
        kept = nucleus
    if params.min_p:
        shares = normalised(scaled, kept)
        best = max(shares.values())
        assume(all(abs(share / best - params.min_p) > 1e-4 or share == best for share in shares.values()))
        kept = [token for token in kept if shares[token] >= params.min_p * best]
    return normalised(scaled, kept)


def normalised(logits: dict[int, float], kept: list[int]) -> dict[int, float]:
    best = max(logits[token] for token in kept)
    weights = {token: math.exp(logits[token] - best) for token in kept}
    return {token: weight / sum(weights.values()) for token, weight in weights.items()}


def sampler(params: SamplingParams, prompt: Sequence[int] = (), output: Sequence[int] = ()) -> Sampler:
    """Return a sampler that has already chosen `output`, forced by large logits."""
    made = Sampler(params, vocab_size=VOCAB, prompt=prompt)
    for token in output:
        spike = mx.where(mx.arange(VOCAB) == token, 1e4, -1e4)[None]
        assert made(spike).item() == token
    return made


def draw(params: SamplingParams, logits: Sequence[float], draws: int = DRAWS, **history_: Any) -> Counter[int]:
    """Return `draws` independent choices from the same logits, adjusted once."""
    adjusting = sampler(params, **history_)
    adjusting.begin()
    batch = mx.broadcast_to(adjusting.adjust(mx.array([list(logits)])), (draws, VOCAB))
    drawing = replace(params, repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0, logit_bias={})
    return Counter(choose([sampler(drawing)] * draws, batch).tolist())  # type: ignore[arg-type]


settings_ = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.3, 0.7, 1.0, 1.8]),
    top_k=st.sampled_from([0, 1, 2, 5, VOCAB - 1, VOCAB, 40]),
    top_p=st.sampled_from([1.0, 0.95, 0.6, 0.1, 1e-6]),
    min_p=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.2, 0.8]),
    presence_penalty=st.sampled_from([0.0, 0.7, -0.4]),
    frequency_penalty=st.sampled_from([0.0, 0.5]),
    logit_bias=st.dictionaries(tokens, st.sampled_from([-100.0, -1.5, 2.0]), max_size=3),
    seed=st.integers(0, 2**64 - 1),
)
history = st.lists(tokens, max_size=4)


@given(rows, settings_, history, history)
def test_draws_come_from_the_documented_distribution(
    logits: list[float], params: SamplingParams, prompt: list[int], output: list[int]
) -> None:
    expected = distribution(penalised(logits, params, prompt, output), params)
    drawn = draw(params, logits, prompt=prompt, output=output)
    assert set(drawn) <= set(expected)
    for token, share in expected.items():
        spread = math.sqrt(share * (1 - share) / DRAWS)
        assert abs(drawn[token] / DRAWS - share) <= 6 * spread + 2 / DRAWS, (token, share, drawn)


@given(rows, settings_, history, st.integers(1, 8))
def test_greedy_answers_follow_the_penalties(
    logits: list[float], params: SamplingParams, prompt: list[int], steps: int
) -> None:
    greedy = SamplingParams(
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=params.logit_bias,
    )
    chosen = sampler(greedy, prompt)
    output = []
    for _ in range(steps):
        values = penalised(logits, greedy, prompt, output)
        best, second = sorted(values, reverse=True)[:2]
        assume(best - second > 1e-3)
        output.append(values.index(best))
        assert chosen(mx.array([logits])).item() == output[-1]


def test_top_k_comes_before_top_p() -> None:
    logits = [math.log(p) for p in (0.4, 0.3, 0.2)] + [math.log(0.1 / 9)] * 9
    # Of the two best, the first has 57 % of the mass and is enough; of all twelve, two would be needed.
    assert set(draw(SamplingParams(temperature=1, top_k=2, top_p=0.5, seed=1), logits)) == {0}
    assert set(draw(SamplingParams(temperature=1, top_p=0.5, seed=1), logits)) == {0, 1}


def test_temperature_comes_before_top_p() -> None:
    logits = [2.0, 1.0] + [-20.0] * (VOCAB - 2)  # 73 % and 27 %; at temperature 0.2, 99.3 %
    assert set(draw(SamplingParams(temperature=1.0, top_p=0.9, seed=1), logits)) == {0, 1}
    assert set(draw(SamplingParams(temperature=0.2, top_p=0.9, seed=1), logits)) == {0}


@pytest.mark.parametrize("top_p", [1e-300, 1e-9, 0.3999])
def test_a_tiny_top_p_leaves_the_best_token(top_p: float) -> None:
    logits = [math.log(0.4), *[math.log(0.6 / 11)] * 11]
    assert set(draw(SamplingParams(temperature=1, top_p=top_p, seed=3), logits)) == {0}


def test_top_p_keeps_the_token_that_reaches_the_sum() -> None:
    logits = [math.log(p) for p in (0.5, 0.25, 0.125)] + [math.log(0.125 / 9)] * 9
    assert set(draw(SamplingParams(temperature=1, top_p=0.6, seed=3), logits)) == {0, 1}


def test_repetition_counts_the_prompt_presence_and_frequency_do_not() -> None:
    logits = mx.array([[3.0, 2.9] + [-9.0] * (VOCAB - 2)])
    assert sampler(SamplingParams(repetition_penalty=1.5), prompt=[0])(logits).item() == 1
    for field in ("presence_penalty", "frequency_penalty"):
        params = SamplingParams(**{field: 0.5})
        assert sampler(params, prompt=[0])(logits).item() == 0
        assert sampler(params, output=[0])(logits).item() == 1


def test_repetition_lowers_negative_logits_too() -> None:
    logits = mx.array([[-1.0, -1.2] + [-9.0] * (VOCAB - 2)])
    assert sampler(SamplingParams(repetition_penalty=1.5), prompt=[0])(logits).item() == 1


def test_frequency_grows_with_every_occurrence() -> None:
    logits = mx.array([[3.0, 2.0] + [-9.0] * (VOCAB - 2)])
    assert sampler(SamplingParams(frequency_penalty=0.4), output=[0, 0])(logits).item() == 0
    assert sampler(SamplingParams(frequency_penalty=0.4), output=[0, 0, 0])(logits).item() == 1
    assert sampler(SamplingParams(presence_penalty=0.4), output=[0, 0, 0])(logits).item() == 0


@pytest.mark.sampled
def test_large_sample_is_the_softmax() -> None:
    """Chi-square with 11 degrees of freedom; 37.4 has a false alarm rate of 1e-4, and the seed is fixed."""
    logits = [0.31 * (i % 5) - 0.17 * i for i in range(VOCAB)]
    draws = 40_000
    params = SamplingParams(temperature=0.8, seed=2024)
    drawn = draw(params, logits, draws)
    expected = normalised({token: value / 0.8 for token, value in enumerate(logits)}, list(range(VOCAB)))
    assert sum((drawn[t] - draws * p) ** 2 / (draws * p) for t, p in expected.items()) < 37.4


def test_same_seed_same_tokens_another_seed_other_tokens() -> None:
    def tokens_of(seed: int | None) -> list[Any]:
        one = sampler(SamplingParams(temperature=1.0, top_p=0.9, seed=seed))
        return [one(mx.zeros((1, VOCAB))).item() for _ in range(30)]

    assert tokens_of(7) == tokens_of(7)
    assert tokens_of(0) != tokens_of(2**64 - 1)
    assert tokens_of(None) != tokens_of(None)  # equal once in 12 ** 30
    mx.random.seed(1)
    assert tokens_of(7) == tokens_of(7)  # the request's own key, not MLX's global state


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_half_precision_logits_are_sampled(dtype: mx.Dtype, temperature: float) -> None:
    params = SamplingParams(
        temperature, 5, 0.9, 0.05, repetition_penalty=1.1, presence_penalty=0.3, logit_bias={3: 1.0}, seed=5
    )
    logits = mx.array([[0.5 * i for i in range(VOCAB)]]).astype(dtype)
    chosen = sampler(params, prompt=[1])(logits)
    assert (chosen.dtype, chosen.shape) == (mx.uint32, (1,))
    assert chosen.item() in range(7, VOCAB)


@given(rows, tokens, st.integers(0, VOCAB))
def test_logprobs_are_the_log_softmax(logits: list[float], token: int, top: int) -> None:
    chosen, ids, values, _ = logprobs(mx.array([logits]), mx.array([token]), top)
    total = math.log(math.fsum(math.exp(value) for value in logits))
    assert chosen.item() == pytest.approx(logits[token] - total, abs=1e-5)
    listed = list(zip(ids[0].tolist(), values[0].tolist(), strict=True))  # type: ignore[arg-type]
    assert len(listed) == len({token for token, _ in listed}) == top
    for position, (best, value) in enumerate(listed):
        assert value == pytest.approx(logits[best] - total, abs=1e-5)
        assert logits[best] == sorted(logits, reverse=True)[position]


@given(rows, tokens, st.booleans())
def test_a_digest_changes_with_the_last_bit_of_any_logit(logits: list[float], token: int, up: bool) -> None:
    rows = np.array([logits] * 3, np.float32)
    rows[2, token] = np.nextafter(rows[2, token], np.float32(math.inf if up else -math.inf))
    one, same, other = (logprobs(mx.array(row[None]), mx.array([0]), 1)[3].item() for row in rows)
    assert one == same != other


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"presence_penalty": math.nan},
        {"frequency_penalty": math.inf},
        {"logit_bias": {3: math.nan}},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.01},
        {"min_p": -0.1},
        {"min_p": 1.1},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": 1e-300},
        {"presence_penalty": 1e308},
        {"frequency_penalty": -1e308},
        {"temperature": 1e308},
        {"seed": -1},
        {"seed": 2**64},
    ],
)
def test_sampling_parameters_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        SamplingParams(**wrong)


@pytest.mark.parametrize("temperature", [1e-300, 1e-45, 1e-7])
def test_a_temperature_next_to_zero_is_greedy(temperature: float) -> None:
    logits = mx.array([[0.0, 3.0, 2.999, -1.0] + [0.0] * (VOCAB - 4)])
    sampler = Sampler(SamplingParams(temperature=temperature, seed=1), vocab_size=VOCAB, prompt=[])
    assert [sampler(logits).item() for _ in range(50)] == [1] * 50


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_the_largest_penalties_stay_apart_on_half_precision_logits(dtype: mx.Dtype) -> None:
    sampler = Sampler(SamplingParams(frequency_penalty=MAX_MAGNITUDE), vocab_size=3, prompt=[0])
    chosen = [sampler(mx.array([[9.0, 8.0, 1.0]], dtype)).item() for _ in range(9)]
    assert chosen == [0, 1, 2] * 3  # each once before any is output again


@pytest.mark.parametrize("token", [-1, VOCAB])
def test_bias_outside_the_vocabulary_is_refused(token: int) -> None:
    with pytest.raises(UsageError, match=str(token)):
        sampler(SamplingParams(logit_bias={token: 1.0}))


@given(st.integers(0, 2**64 - 1))
def test_keys_are_split_as_mlx_splits_them(key: int) -> None:
    array = mx.random.split(mx.array([key >> 32, key & 2**32 - 1], mx.uint32))
    assert split_key(key) == tuple(first << 32 | second for first, second in array.tolist())  # type: ignore[union-attr]


def test_batched_choices_equal_single_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """For any temperatures, cuts, penalties, keys and drafts, over several steps."""
    ways = [
        SamplingParams(),
        SamplingParams(temperature=0.7, top_k=5, seed=1),
        SamplingParams(temperature=1.4, top_p=0.8, frequency_penalty=0.4, seed=2),
        SamplingParams(repetition_penalty=1.3, logit_bias={3: 1.0}),
        SamplingParams(temperature=1.0, min_p=0.1, seed=3),
        SamplingParams(temperature=1.0, seed=4),
    ]
    together, apart = ([sampler(params, [1, 2]) for params in ways] for _ in range(2))
    random = np.random.default_rng(9)
    for step in range(12):
        drafts = [[int(g) for g in random.integers(0, VOCAB, (i + step) % 3)] for i in range(len(ways))]
        rows = [mx.array(random.normal(size=(1 + len(own), VOCAB)).astype(np.float32)) for own in drafts]
        alone = [choose([one], own, [draft]).tolist() for one, own, draft in zip(apart, rows, drafts, strict=True)]
        calls: list[Any] = []
        with monkeypatch.context() as patch:
            ops = select()
            patch.setattr(
                ops, "sample", lambda *given, call=ops.sample, calls=calls: calls.append(given) or call(*given)
            )
            chosen = choose(together, mx.concatenate(rows), drafts).tolist()
        assert len(calls) == 1
        assert chosen == [token for own in alone for token in own]
        for sampler_, own in zip([*together, *apart], drafts * 2, strict=True):
            sampler_.commit(1 + len(own) // 2)
