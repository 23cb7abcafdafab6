"""Where an engine's process begins: `python -P start.py PACKAGE DESCRIPTOR`, run by `app.engine.link`, never imported.

`headrace` is taken from the folder PACKAGE, where the chat has it from. Nothing is put on the search path: no folder of
the user's can stand in for ours, and nothing that is installed beside headrace for a module of the standard library.
"""

import importlib.util
import sys
from pathlib import Path


def take(package: Path) -> None:
    """Import `headrace` from this folder."""
    spec = importlib.util.spec_from_file_location(
        "headrace", package / "__init__.py", submodule_search_locations=[str(package)]
    )
    assert spec is not None
    assert spec.loader is not None
    sys.modules["headrace"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["headrace"])


if __name__ == "__main__":
    take(Path(sys.argv[1]))
    from headrace.app.engine.process import main

    main(int(sys.argv[2]))
