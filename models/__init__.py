"""Models: checkpoints, downloads and the store, tokenizers, networks, and their step costs.

    loading -> registry -> cost -> mlx_lm -> network -> gguf -> text -> checkpoint -> architectures

Each folder imports from those to its right alone; an import contract in pyproject.toml guards that. `loading` makes a
network of a model's name, which `registry` finds or downloads.
"""
