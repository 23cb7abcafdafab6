"""Tool calls: the forms in which models write them, their separation from text, and grammars that force them."""
