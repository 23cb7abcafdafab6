"""Random keys of 64 bits, split on the host with the results of `mx.random.split`.

Threefry-2x32 with 20 rounds (Salmon et al., SC 2011) on counters (0, 2) and (1, 3). Both blocks run at once, as two
lanes of one integer.
"""

_WORD = 2**32 - 1
_LANES = _WORD | _WORD << 64
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA


def split(key: int) -> tuple[int, int]:
    """Return (next key, key to use now)."""
    words = key >> 32, key & _WORD
    schedule = [word | word << 64 for word in (*words, words[0] ^ words[1] ^ _PARITY)]
    x = schedule[0] + (0 | 1 << 64) & _LANES
    y = schedule[1] + (2 | 3 << 64) & _LANES
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            x = x + y & _LANES
            y = (y << rotation | y >> 32 - rotation) & _LANES ^ x
        x = x + schedule[(group + 1) % 3] & _LANES
        y = y + schedule[(group + 2) % 3] + (group + 1) * (1 | 1 << 64) & _LANES
    return (x & _WORD) << 32 | x >> 64, (y & _WORD) << 32 | y >> 64
