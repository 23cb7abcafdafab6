"""K/V of many sequences in blocks: who holds which, what prefixes they share, the arrays behind them."""
