"""`headrace quantize`: bits of each projection chosen by measured effect on the logits, within a budget."""
