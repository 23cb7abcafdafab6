"""Quantize the Q4_1 matrices of a GGUF file anew to Q4_0, which all engines read alike.

python -m tests.bench.to_q4_0 MODEL.Q4_1.gguf MODEL.Q4_0.gguf
"""

import sys

from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from gguf.quants import dequantize, quantize

MOSTLY_Q4_0 = 2  # general.file_type
_OLD = GGMLQuantizationType.Q4_1
_NEW = GGMLQuantizationType.Q4_0


def convert(source: str, target: str) -> None:
    """Write `target`, with all metadata and other tensors of `source` as they are."""
    reader = GGUFReader(source)
    writer = GGUFWriter(target, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue  # the writer's own
        kind = field.types[0]
        value = field.contents()
        if kind == GGUFValueType.ARRAY:
            writer.add_key_value(name, value, kind, sub_type=field.types[-1])
        else:
            writer.add_key_value(name, MOSTLY_Q4_0 if name == "general.file_type" else value, kind)
    for tensor in reader.tensors:
        old = tensor.tensor_type == _OLD
        data = quantize(dequantize(tensor.data, _OLD), _NEW) if old else tensor.data
        writer.add_tensor(tensor.name, data, raw_dtype=_NEW if old else tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    convert(*sys.argv[1:])
