#!/usr/bin/env bash
# gguf 0.19.0 (PyPI), numpy 2: GGUFReader opens a big-endian file, which GGUFWriter wrote with endianess=BIG, and gives
# its keys and `tensor.data` right (a big-endian array). gguf.quants.dequantize of the same tensor gives other numbers
# and no error, for it views the bytes in the order of this machine:
#     data [1. 2. 3. 4.]  dequantized [4.6006e-41 8.9683e-44 2.3049e-41 4.6007e-41]
# One would guess that dequantize(tensor.data, tensor.tensor_type) of F32 is the identity for whatever the reader gives.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet gguf==0.19.0 "numpy>=2,<3"
"$folder/venv/bin/python" - "$folder/big.gguf" <<'PYTHON'
import sys

import gguf
import numpy as np

writer = gguf.GGUFWriter(sys.argv[1], "llama", endianess=gguf.GGUFEndian.BIG)
writer.add_float32("llama.scale", 1.5)
writer.add_tensor("a", np.array([[1, 2, 3, 4]], np.float32))
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
reader = gguf.GGUFReader(sys.argv[1])
[tensor] = reader.tensors
numbers = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
print("key", reader.fields["llama.scale"].contents(), "data", tensor.data[0], "dequantized", numbers[0])
right = reader.fields["llama.scale"].contents() == 1.5 and tensor.data.tolist() == [[1, 2, 3, 4]]
sys.exit(0 if right and numbers.tolist() != tensor.data.tolist() else 1)
PYTHON
