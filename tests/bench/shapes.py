"""Model shapes for benchmarks: llama-style decoders and a mixture of experts."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """A llama-shaped model, or a mixture of experts in the shape of Qwen3, with tied embeddings.

    `bits` and `group` are of the layers, `head_*` of the embedding.
    """

    layers: int = 30
    width: int = 576
    heads: int = 9
    kv_heads: int = 3
    head_dim: int = 64
    hidden: int = 1536
    vocab: int = 49152
    bits: int = 4
    group: int = 32
    head_bits: int = 8
    head_group: int = 32
    experts: int = 0  # of size `hidden`, in place of a dense feed-forward; 0 for none
    active: int = 0  # of them, for each token

    @property
    def qkv_rows(self) -> int:
        """Rows of the query, key and value projections together."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim


TINY = Shape(2, 128, 4, 2, 32, 192, 320, 4, 64, 4, 64)
TINY_MIXTURE = Shape(2, 128, 4, 2, 32, 64, 320, 4, 64, 4, 64, 6, 2)
SHAPES = {
    "135m": Shape(),  # the default model
    "1b": Shape(16, 2048, 32, 8, 64, 8192, 128256, 4, 64, 4, 64),  # Llama 3.2 1B
    "3b": Shape(28, 3072, 24, 8, 128, 8192, 128256, 4, 64, 4, 64),  # Llama 3.2 3B
    "30b-a3b": Shape(6, 2048, 32, 4, 128, 768, 16384, 4, 64, 4, 64, 128, 8),  # Qwen3 30B A3B, an eighth of its layers
    "tiny": TINY,  # for tests of the scripts themselves
}
