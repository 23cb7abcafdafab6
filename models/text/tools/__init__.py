"""Tool calls: the forms in which models write them, their separation from text, and grammars that force them.

use.py       the tools of a request
table.py     the form of a model: a row for each family, or markup that written.py learns from its template
form.py      base of the forms, each of which reads and writes calls and has grammar rules; the files by family
stream.py    an answer's text -> text and calls (call.py), those of a cut answer by cut.py
tagged.py, value_rules.py   grammar rules of values
"""
