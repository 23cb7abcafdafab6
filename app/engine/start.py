"""Entry point of an engine process: `python -P start.py PACKAGE DESCRIPTOR`, run by `app.engine.link`, never imported.

PACKAGE is the folder from which the starting process imported `headrace`. The search path stays unchanged: no folder
of the user replaces our packages, and no module next to headrace replaces one of the standard library. DESCRIPTOR is
the number of the inherited socket. `EngineLink` builds this command.

tests/app/engine/test_client.py starts engines by it.
"""

import importlib.util
import sys
from pathlib import Path


def import_package(package: Path) -> None:
    """Import `headrace` from this folder."""
    spec = importlib.util.spec_from_file_location(
        "headrace", package / "__init__.py", submodule_search_locations=[str(package)]
    )
    assert spec is not None
    assert spec.loader is not None
    # Entered before it runs, as `import` does: its own code may import from `headrace`.
    sys.modules["headrace"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["headrace"])


if __name__ == "__main__":
    import_package(Path(sys.argv[1]))
    from headrace.app.engine.process import main

    main(int(sys.argv[2]))
