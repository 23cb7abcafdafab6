"""Write the golden file of the kernels' Metal source again."""

from tests.metal.emulator import GOLDEN, sources

GOLDEN.write_text(sources(), encoding="utf-8")
