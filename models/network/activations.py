"""Bits of rounded activations: 16, or 8 for a prompt's rows, on the native kernels (docs/kernels.md).

`--activations` asks for them; `models.loading` calls `with_activations` once the network is loaded. Layers that run as
one node are the only ones that round to 8 bits, so the decoder's groups of layers are read here.

Guard: tests/models/network/test_activations.py.
"""

from headrace.models.network.decoder import Decoder
from headrace.models.network.long_rope_decoder import long_rope
from headrace.runtime.config import environment
from headrace.runtime.errors import UsageError
from headrace.runtime.network import Network

_WIDTHS = {2, 4, 8}  # bits of weights that the kernels multiply by 8-bit activations; others meet 16 bits


def with_activations(network: Network, wanted: int) -> Network:
    """Return a network that shares every weight with `network`, and rounds a prompt's activations to `wanted` bits.

    Raises UsageError, with the reason, if they cannot be rounded to 8.
    """
    if wanted == network.activations:
        return network
    if wanted == 16:  # it has 8 now, so `unsupported` found no reason
        assert isinstance(network, Decoder)
        return network.with_activations(16)
    reason = unsupported(network)
    if reason is not None:
        raise UsageError(f"activations cannot be rounded to 8 bits here: {reason}", "--activations 16 always works")
    assert isinstance(network, Decoder)
    return network.with_activations(8)


def unsupported(network: Network) -> str | None:
    """Return why a prompt's activations cannot be rounded to 8 bits; None if they can."""
    if not isinstance(network, Decoder):
        return "the model's class rounds to 16"
    if network.ops.name != "native":
        return f"the {network.ops.name} operations do not round"
    if environment.exact():
        return "HEADRACE_EXACT asks for float32 throughout"
    if long_rope(network.config) is not None:
        return "LongRoPE has two sets of layers"
    if not rounded_widths(network):
        return "no layer of this model runs whole, with 2-, 4- or 8-bit weights"
    return None


def rounded_widths(network: Decoder) -> set[int]:
    """Return the bits of weights that meet rounded activations in layers that run as one node.

    Mixers and experts keep 16 bits, and codes of mxfp8 are floats, which meet no rounded activations.
    """
    fused = [layer for part, node in network._layer_groups if node is not None for layer in network._layers[part]]
    weights = [
        weight
        for layer in fused
        if layer.mixer is None
        for weight in (*layer.qkv, layer.output, *layer.gate_up, layer.down)
        if weight is not None and weight.mode != "mxfp8"
    ]
    return {weight.bits for weight in weights} & _WIDTHS
