"""K/V of many sequences in blocks: ownership of blocks, shared prefixes, the arrays of the blocks."""
