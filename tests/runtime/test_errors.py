"""The tree of exceptions that `runtime.errors` draws is that of its classes."""

import re

from headrace.runtime import errors

# `    │   └── UnknownSessionError   exit code 2: ...`: each level is four columns further in.
LINE = re.compile(r" {4}(?P<branch>[│├└─ ]*)(?P<name>\w+Error) +(?:exit code (?P<code>\d))?")


def test_the_documented_tree_of_errors_matches_their_classes() -> None:
    drawn: dict[str, tuple[str, int]] = {}  # base and exit code by name
    path: list[str] = []  # from the root to the line before
    for line in (errors.__doc__ or "").splitlines():
        node = LINE.match(line)
        if node is None:
            continue
        del path[len(node["branch"]) // 4 :]
        base, inherited = (path[-1], drawn[path[-1]][1]) if path else ("Exception", 0)
        drawn[node["name"]] = (base, int(node["code"] or inherited))
        path.append(node["name"])
    classes = [item for item in vars(errors).values() if isinstance(item, type)]
    assert drawn == {item.__name__: (item.__base__.__name__, item.exit_code) for item in classes}
