"""Conversion of weights quantized by other tools to MLX's affine groups.

    matrices    foreign matrices and the tensors they become
    formats     recognition of the format, from headers and config.json alone
    nf4         codes of 4 bits into a table: bitsandbytes

`checkpoint.arrays` converts the weights: 8-bit floats and integers with scales per tensor, channel, group or block, and
integers of 2, 4 or 8 bits in words (GPTQ, AWQ, compressed-tensors).

Values that affine groups represent exactly are regrouped; all others are dequantized exactly and quantized to 8 bits.
"""
