"""The methods of `Decoder` that its subclasses replace are those of the table in its module."""

import ast
import re
from pathlib import Path

from headrace.models.network import decoder

FOLDER = Path(decoder.__file__).parent
TABLE = re.compile(r"^ {4}(\w+_decoder) {2,}([\w, ]+)$", re.MULTILINE)


def methods(tree: ast.ClassDef) -> set[str]:
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name != "__init__"}


def classes(file: Path) -> list[ast.ClassDef]:
    return [node for node in ast.parse(file.read_text()).body if isinstance(node, ast.ClassDef)]


def test_decoder_lists_the_methods_that_subclasses_replace() -> None:
    [base] = [each for each in classes(FOLDER / "decoder.py") if each.name == "Decoder"]
    replaced = {
        file.stem: sorted(methods(each) & methods(base))
        for file in FOLDER.glob("*_decoder.py")
        for each in classes(file)
        if "Decoder" in map(ast.unparse, each.bases)
    }

    assert decoder.__doc__ is not None
    listed = {name: row.split(", ") for name, row in TABLE.findall(decoder.__doc__)}

    assert listed == replaced
