"""Model names, catalog, downloads and the local store.

resolve.py     a name -> a directory: source.py parses it, store.py and hub_cache.py have what is here
  fetch_hub.py, fetch_wheel.py   downloads; catalog.py has what a plain name stands for
  import_gguf.py                 a GGUF file as an entry of the store; other_programs.py finds those of others
  adapters.py                    the part of a name after a plus sign
find_shape.py  a name -> its costs, without weights
checksums.py   integrity; background_check.py looks again while a model runs
"""
