"""Structured output: JSON schemas, regular expressions and Lark grammars as masks over a model's vocabulary.

grammar_source.py   the text of a grammar, and that of a JSON schema
grammars.py     compiles it for one model, with its vocabulary, after a trial (trial.py)
matcher.py      the result, an engine's `Constraint`; json_scan.py narrows its masks where the answer is JSON
"""
