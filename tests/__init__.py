"""Tests. A module's own test has its name, in the folder that mirrors its folder.

    app/chat/turn.py             tests/app/chat/test_turn.py
    app/tui/decode/meters.py     tests/tui/decode/test_meters.py

Tests of several modules together stand in the nearest folder above. `parity/` compares with other implementations;
`faults/`, `fuzz/` and `soak/` break inputs, disks and processes; `style/` has rules of texts; `support/` is shared.

`python -m tests.guards FILE` prints the test files that guard a module, nearest first.
"""
