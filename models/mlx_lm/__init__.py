"""Networks of mlx-lm's model classes, for architectures that headrace's decoder does not run.

network.py    a class as a `runtime.network.Network`: load.py makes it, fixes.py corrects it, kernels.py puts our
              kernels into it, adapter.py adapters
backend.py    its K/V: caches (cache.py), prefixes, files
costs.py      the bytes of a step, from its graph
mtp.py, ranked.py, long_rope.py   prediction heads, several ranks, LongRoPE
"""
