"""Rule by which a mixture of experts chooses the experts of a token and weighs them.

An architecture's `ExpertsConfig` extends it with names and sizes, and `runtime.ops.Mixture` has it next to the weights.
It is apart from both since the table of architectures is read without an import of MLX.

Guards: tests/runtime/ops/test_native_experts.py, tests/parity/test_mlx_lm_families.py.
"""

from msgspec import Struct


class Routing(Struct, frozen=True):
    """Choice and weights of a token's experts.

    The experts with the largest scores are used. Their weights are the scores (Shazeer et al., arXiv:1701.06538).

    best: groups are ranked by the sum of their so many largest scores: two (DeepSeek-V3, arXiv:2412.19437), or one
        (V2, arXiv:2405.04434).
    """

    count: int  # experts
    active: int  # of them, for each token
    normalized: bool  # weights of the active experts are divided by their sum
    sigmoid: bool = False  # scores are sigmoids of the router's logits, not their softmax
    scale: float = 1.0  # factor of the weights
    groups: tuple[int, int] = (1, 1)  # groups of experts, and those of them that a token may use
    best: int = 2
    shares_first: bool = False  # weights multiply the experts' input, not their output (Llama 4)
    # Above 0, experts are chosen one after the other, each with its share of those that are as good within this
    # (Phi MoE).
    band: float = 0.0
    routes_early: bool = False  # the router reads the layer's input as it is, before attention (SmallThinker)
