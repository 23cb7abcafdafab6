"""The list of deliberate faults applies: each text occurs once, each changed file compiles, each test exists."""

from tests.faults.deliberate.faults import ROOT, Fault, faults

FAULTS = faults()


def test_every_fault_can_be_applied() -> None:
    for fault in FAULTS:
        try:
            check(fault)
        except Exception as error:
            raise AssertionError(fault.id) from error


def check(fault: Fault) -> None:
    compile(fault.applied(), fault.file, "exec")
    assert fault.text != fault.replacement
    assert fault.tests
    for test in fault.tests:
        path, _, function = test.partition("::")
        assert (ROOT / path).exists()
        if function:
            assert f"def {function.partition('[')[0]}(" in (ROOT / path).read_text(encoding="utf-8")


def test_the_list_covers_every_layer() -> None:
    assert len({fault.id for fault in FAULTS}) == len(FAULTS) >= 150
    per_layer = {
        layer: sum(fault.file.startswith(f"{layer}/") for fault in FAULTS) for layer in ("app", "models", "runtime")
    }
    assert min(per_layer.values()) >= 15
