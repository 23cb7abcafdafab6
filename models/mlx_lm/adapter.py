"""LoRA adapters on mlx-lm's classes: merged into plain projections, mlx-lm's `LoRALinear` around quantized ones.

`mlx_lm.load` calls `apply_adapter`. tests/models/mlx_lm/test_adapter.py compares both ways.
"""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from headrace.models.checkpoint.adapter import Adapter
from headrace.models.checkpoint.safetensors import Checkpoint
from headrace.models.mlx_lm.fixes import class_name
from headrace.models.network.adapted import Changes, below_the_model, module_names
from headrace.models.network.weight_arrays import loaded, weight_arrays
from headrace.runtime.errors import UnsupportedModelError


def apply_adapter(model: Any, checkpoint: Checkpoint, adapter: Adapter) -> None:
    """Apply the adapter to a model whose weights are those of the checkpoint.

    Raises UnsupportedModelError for a change of what the class does not have, has in another form, or of a layer other
    than a projection, and CheckpointError for factors of another shape.
    """
    from mlx_lm.tuner.lora import LoRALinear

    # Changes are looked up by the class's own names, of all its modules with a weight: others are refused below.
    layers = {path: layer for path, layer in model.named_modules() if type(layer) in (nn.Linear, nn.QuantizedLinear)}
    names = [f"{path}.weight" for path, layer in model.named_modules() if "weight" in layer]
    changes = Changes(adapter, {name: name for name in names})  # a class has no second names, as a checkpoint has
    wrapped = []
    for path, layer in layers.items():
        rows, columns = layer.weight.shape
        if isinstance(layer, nn.QuantizedLinear):  # its codes are packed into words of 32 bits
            columns = columns * 32 // layer.bits
        change = changes.take(path, rows, columns)
        if change is None:
            continue
        if not adapter.is_mlx_lms or checkpoint.gguf:  # else it was trained on the class itself
            _check_form(path, layer, checkpoint)
        if type(layer) is nn.Linear:
            layer.weight = change.merged(layer.weight)
            continue
        a, b = change.scaled()
        product = LoRALinear.from_base(layer, r=a.shape[0], scale=1.0)
        product.lora_a = a.T
        product.lora_b = b.T
        wrapped.append((path, product))
    changes.check_taken()
    model.update_modules(tree_unflatten(wrapped))
    model.eval()


def _check_form(path: str, layer: Any, checkpoint: Checkpoint) -> None:
    """Raise UnsupportedModelError unless the class has a layer's weight as the checkpoint stores it.

    Classes join, split and scale some weights, and an adapter is made for the stored ones.
    """
    # The stored module: its prefix before `layers` may differ from the class's.
    stored_modules = module_names({name: name for name in checkpoint.tensors})  # by their names with and without it
    stored = stored_modules.get(path) or stored_modules.get(below_the_model(path))

    arrays = weight_arrays(checkpoint)
    if stored is None or not mx.array_equal(loaded(arrays[f"{stored}.weight"]), layer.weight).item():
        raise UnsupportedModelError(
            f"the adapter changes {path}, which {class_name(checkpoint.config)} has in another form than its file",
            "merge the adapter into its base, and load the result",
        )
