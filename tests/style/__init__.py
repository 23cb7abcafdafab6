"""Plain language and small parts, counted; the wording of help and errors, in files that a review can read."""
