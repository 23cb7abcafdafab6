"""The list of deliberate faults applies: each text occurs once, each changed file compiles, each test exists."""

import pytest

from tests.faults.deliberate.faults import ROOT, Fault, faults

FAULTS = faults()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.id)
def test_a_fault_can_be_applied(fault: Fault) -> None:
    compile(fault.applied(), fault.file, "exec")
    assert fault.text != fault.replacement
    assert all((ROOT / test.partition("::")[0]).exists() for test in fault.tests)
    assert fault.tests


def test_the_list_covers_every_layer() -> None:
    assert len({fault.id for fault in FAULTS}) == len(FAULTS) >= 120
    per_layer = {
        layer: sum(fault.file.startswith(f"{layer}/") for fault in FAULTS) for layer in ("app", "models", "runtime")
    }
    assert min(per_layer.values()) >= 15
