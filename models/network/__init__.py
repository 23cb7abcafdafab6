"""headrace's decoder: layers, their weights and costs, prediction heads, parts of several ranks.

    decoder.py         Decoder; altup_decoder.py, block_residual_decoder.py, long_rope_decoder.py and rwkv_decoder.py
                       are variants, and make_decoder.py chooses
      layers.py        its weights, with mixers.py and feed_forwards.py: parameters.py reads them, tensors.py has the
                       table of their names and sizes
      projections.py   steps of a layer; latent.py, layer_inputs.py and rope.py are parts of some
      decoder_costs.py its cost in bytes and FLOPs, also without weights
    several ranks      stage_decoder.py divides by layers; tensor_decoder.py, tensor_part.py in them
    prediction heads   mtp.py finds their tensors, head_decoder.py runs them

`models.loading` makes all of them. Results are compared with other programs' in tests/parity.
"""
