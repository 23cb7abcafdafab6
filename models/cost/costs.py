"""What a checkpoint's step costs, before anything is loaded, and what memory there has to be beside the weights."""

from headrace.models.checkpoint.safetensors import Checkpoint
from headrace.models.cost.shape_sources import shape_of_checkpoint
from headrace.runtime.cost import StepCost
from headrace.runtime.errors import UnsupportedModelError

WORKING_MEMORY = 150 << 20  # besides weights and KV cache: activations of a prefill chunk, the program itself


def checkpoint_cost(checkpoint: Checkpoint) -> StepCost | None:
    """The cost of a step from headers alone, K/V in half precision. None where the matrices are not known by name."""
    try:
        return shape_of_checkpoint(checkpoint).cost
    except UnsupportedModelError:
        return None
