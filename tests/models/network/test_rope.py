"""Rotary periods: against mlx-lm's implementations where it has them, against the published formulas where not."""

import math
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.models.architectures.config import RopeConfig
from headrace.models.network.rope import make_rope
from headrace.runtime.errors import CheckpointError

CONTEXT = 131072
YARN = {"factor": 4.0, "original_max_position_embeddings": 32768}

dims = st.sampled_from([16, 32, 64, 80, 128])
thetas = st.sampled_from([1e4, 1e5, 5e5, 1e6])
factors = st.floats(1.0, 64.0)
trained = st.sampled_from([2048, 8192, 32768])


def periods(theta: float, dim: int, kind: str, scaling: dict[str, Any]) -> list[float]:
    found: list[float] = make_rope(RopeConfig(theta, kind, scaling), dim, CONTEXT).periods.tolist()  # type: ignore[assignment]
    return found


@given(dims, thetas)
def test_plain_rope_has_the_published_periods(dim: int, theta: float) -> None:
    rope = make_rope(RopeConfig(theta), dim, CONTEXT)
    assert (rope.dims, rope.amplitude, rope.periods.dtype) == (dim, 1.0, mx.float32)
    assert rope.periods.tolist() == pytest.approx([theta ** (2 * i / dim) for i in range(dim // 2)], rel=1e-6)


@given(dims, thetas, factors)
def test_linear_rope_scaling_stretches_every_period(dim: int, theta: float, factor: float) -> None:
    plain, stretched = (periods(theta, dim, kind, {"factor": factor}) for kind in ("default", "linear"))
    assert stretched == pytest.approx([factor * period for period in plain], rel=1e-6)


@pytest.mark.peer
@settings(deadline=None)  # the first example imports mlx-lm
@given(dims, thetas, factors, trained)
def test_llama3_equals_mlx_lm(dim: int, theta: float, factor: float, length: int) -> None:
    from mlx_lm.models.rope_utils import initialize_rope

    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": length,
    }
    theirs = initialize_rope(dim, theta, False, scaling, CONTEXT)._freqs.tolist()
    assert periods(theta, dim, "llama3", scaling) == pytest.approx(theirs, rel=1e-5)


@pytest.mark.peer
@settings(deadline=None)  # the first example imports mlx-lm
@given(dims, thetas, factors, trained, st.sampled_from([{}, {"beta_fast": 16, "beta_slow": 2}]))
def test_yarn_equals_mlx_lm(dim: int, theta: float, factor: float, length: int, betas: dict[str, int]) -> None:
    from mlx_lm.models.rope_utils import initialize_rope

    scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": length, **betas}
    theirs = initialize_rope(dim, theta, False, scaling, CONTEXT)
    mine = make_rope(RopeConfig(theta, "yarn", scaling), dim, CONTEXT)
    assert mine.periods.tolist() == pytest.approx(theirs._freqs.tolist(), rel=1e-5)
    assert mine.amplitude == pytest.approx(theirs.mscale)


def test_yarn_amplitude_as_published() -> None:
    """The paper's 0.1 ln(s) + 1, unless the checkpoint states a factor, or both of DeepSeek's multipliers."""

    def amplitude(**more: float) -> float:
        return make_rope(RopeConfig(1e6, "yarn", {**YARN, **more}), 128, CONTEXT).amplitude

    usual = 0.1 * math.log(4) + 1
    assert amplitude() == pytest.approx(usual)
    assert amplitude(attention_factor=0.7) == 0.7
    assert amplitude(mscale=0.5) == pytest.approx(usual)
    assert amplitude(mscale=2.0, mscale_all_dim=0.5) == pytest.approx(
        (0.2 * math.log(4) + 1) / (0.05 * math.log(4) + 1)
    )
    assert amplitude(factor=1.0) == 1.0


def test_yarn_takes_its_factor_from_the_context_where_it_is_null() -> None:
    assert periods(1e6, 128, "yarn", {**YARN, "factor": None}) == periods(1e6, 128, "yarn", YARN)  # 131072 / 32768


def test_yarn_without_truncation_ramps_between_fractional_pairs() -> None:
    whole, exact = (periods(1e6, 128, "yarn", {**YARN, "truncate": truncate}) for truncate in (True, False))
    assert whole[0] == exact[0] == 1.0
    assert whole[-1] == exact[-1]
    assert whole != exact


@pytest.mark.parametrize(
    ("kind", "scaling"),
    [
        ("linear", {}),
        ("linear", {"factor": "two"}),
        ("linear", {"factor": [2]}),
        ("linear", {"factor": 2.4e-53}),  # a float, but nothing that float32 holds
        ("llama3", {}),
        ("llama3", {"factor": 0.0}),
        ("yarn", {"factor": None}),
        ("yarn", {"factor": 4.0, "original_max_position_embeddings": 0}),
        ("yarn", {"factor": 4.0, "beta_fast": -1}),
        ("yarn", {"factor": 4.0, "mscale": 1.0, "mscale_all_dim": {}, "attention_factor": "x"}),
    ],
)
def test_broken_rope_scaling_is_one_error(kind: str, scaling: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=kind):
        periods(1e4, 64, kind, scaling)


@pytest.mark.parametrize(("head_dim", "share"), [(64, 2.0**53), (64, 1e-9), (64, 0.515625), (2**30, 1.0)])
def test_an_impossible_share_of_rotated_dimensions_is_refused(head_dim: int, share: float) -> None:
    with pytest.raises(CheckpointError, match="of a head"):
        make_rope(RopeConfig(1e4, "default", None, share), head_dim, 64)


@given(
    st.sampled_from(["linear", "llama3", "yarn"]),
    st.dictionaries(
        st.sampled_from(
            ["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings", "beta_fast"]
        ),
        st.one_of(st.none(), st.integers(), st.floats(), st.text(max_size=3), st.booleans(), st.just([1])),
    ),
)
def test_any_rope_scaling_is_refused_or_gives_finite_periods(kind: str, scaling: dict[str, Any]) -> None:
    try:
        rope = make_rope(RopeConfig(1e4, kind, scaling), 64, CONTEXT)
    except CheckpointError:
        return
    assert all(math.isfinite(period) and period > 0 for period in rope.periods.tolist())  # type: ignore[union-attr]
    assert math.isfinite(rope.amplitude)
