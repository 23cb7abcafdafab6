"""Loading: from a checkpoint to a network and a tokenizer that fit into memory, draft models, quantized copies.

load.py              a model: decoder_choice.py chooses its decoder, sized.py measures it before weights are read,
                     recommended.py has its sampling, activation_choice.py the bits of its activations
ranked.py            the same on several ranks, each a rank_part.py
draft.py             a draft model beside it
keep_quantized.py    a quantized copy; mixed_quantization.py one with a format for each projection (bit_choice.py),
                     rounded by fitted_rounding.py with the weights of importance.py
divergence.py        how far that is from the original, on a text that goes through both (forcing.py)
"""
