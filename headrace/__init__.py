"""headrace: run a quantized language model on your own machine and see exactly how the decode loop behaves.

The package's parts stand at the top of the repository (`app/`, `models/`, `runtime/`, `assets/`); the links beside this
file make them `headrace.app` and so on, in the source tree as in an installed wheel.
"""
