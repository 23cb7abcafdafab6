"""K/V of many sequences: caches, blocks and their owners, shared prefixes, blocks on disk.

backend.py (protocol) <- paged.py    native kernels: block tables, whose blocks attention reads in place
                      <- buffers.py  stock MLX: slot_cache.py, buffers of one sequence or slots of shared ones
both                  -> pool.py     who uses which block; prefix_index.py finds cached ones, paged_arrays.py has
                                     their memory, disk.py stores them
"""
