"""From a name, a path or a hub id to a network and a tokenizer, and what one decode step of it costs."""
