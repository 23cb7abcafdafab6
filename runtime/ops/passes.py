"""What a pass through the layers says of its rows besides their numbers.

A row belongs to a phase, and that alone decides how it attends: prefill rows are a prompt's, decode rows the next token
of a sequence, alone or with up to 15 guesses behind it that are to be verified. On the native kernels a row of a phase
has the same bits however many rows are in its pass, wherever a prompt was cut, and whatever the number of threads.
"""

from typing import Literal

Phase = Literal["prefill", "decode"]
