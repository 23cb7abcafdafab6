"""Routers of mlx-lm's mixtures on the kernels: products in float32, so that near-tied experts do not flip."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from headrace.models.mlx_lm.kernels import _Projection, exchange, stored_arrays
from headrace.models.mlx_lm.load import of_config
from headrace.runtime.ops import native
from tests.support.every_module import EXPERTS, config_of, names

pytestmark = [
    pytest.mark.peer,
    pytest.mark.skipif(not native.status().available, reason="the native kernels are not built"),
]

ROUNDING = 2e-6  # of the largest logit; activations in 16 bits would cost more than ten times that
_OTHERS = ("shared_expert_gate", "in_proj_a", "in_proj_b", "in_proj_ba")  # layers of as many rows that choose nothing


def linear_layers(model: Any) -> dict[str, Any]:
    """Return the layers with a row per expert, by path."""
    return {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear | nn.QuantizedLinear)
        and module.weight.shape[0] == EXPERTS
        and not path.endswith(_OTHERS)
    }


def quantize(model: Any) -> None:
    """Quantize what divides into groups, but for parts that the class leaves plain."""
    predicate = getattr(model, "quant_predicate", lambda _path, _module: True)

    def wanted(path: str, module: Any) -> bool:
        divides = hasattr(module, "to_quantized") and module.weight.shape[-1] % 32 == 0
        return divides and predicate(path, module) is not False

    nn.quantize(model, group_size=32, bits=4, class_predicate=wanted)


_PARTS = 6  # of the classes


@pytest.mark.sampled
@pytest.mark.parametrize("part", range(_PARTS))
def test_routers_of_all_classes_are_exact(part: int) -> None:
    from mlx_lm.models.cache import make_prompt_cache
    from mlx_lm.models.switch_layers import SwitchLinear

    checked = set()
    for name in names()[part::_PARTS]:
        config = {**config_of(name), "dtype": "float32"}
        model = of_config(config)
        if not any(isinstance(module, SwitchLinear) for _, module in model.named_modules()):
            continue
        quantize(model)
        routers = linear_layers(model)
        weights = {path: float_weight(module) for path, module in routers.items()}
        exchange(model, stored_arrays(model), native, lambda model=model: make_prompt_cache(model))
        modules = dict(model.named_modules())
        for path, weight in weights.items():
            if not isinstance(modules[path], _Projection):
                continue  # stock MLX multiplies in float32
            x = mx.random.normal((1, 5, weight.shape[1]), key=mx.random.key(3))
            expected = x @ weight.T
            bias = routers[path].get("bias")
            expected = expected if bias is None else expected + bias
            wrong = mx.abs(modules[path](x) - expected).max() / mx.abs(expected).max()
            assert wrong.item() < ROUNDING, f"{name}: {path}"
            checked.add(name)
    assert len(checked) >= 2  # the least of a part; 26 in all


def float_weight(module: Any) -> mx.array:
    if "scales" not in module:
        return module.weight
    scales = module.scales
    biases = module.biases
    return mx.dequantize(module.weight, scales, biases, module.group_size, module.bits)
