"""One kernel thread for the real model: what is compared here does not depend on it, and tests run side by side."""

from collections.abc import Iterator

import pytest

from headrace.runtime.ops import native


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    if not native.status().available:
        yield
        return
    native.set_threads(1)
    yield
    native.set_threads(0)
