"""Structured output: JSON schemas, regular expressions and Lark grammars as masks over a model's vocabulary."""
