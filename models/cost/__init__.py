"""What a step of a model reads and computes, and what memory it needs, from shapes alone."""
