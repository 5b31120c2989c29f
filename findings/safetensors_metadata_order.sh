#!/usr/bin/env bash
# safetensors 0.8.0: the same tensors and metadata give other bytes in every process, once there are two metadata entries.
#
# Tensors are written in a fixed order, but `__metadata__` in that of a hash table with random keys. A checksum of the
# file is no checksum of the model; with at most one entry (such as format: pt) the bytes repeat.
#
# Seen:    5 processes: 1 file with one entry, 5 files with eight entries
# A guess: the header is sorted or keeps the order of the dict, so that equal input gives equal bytes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet safetensors==0.8.0 "numpy>=2,<3"
files_of() {
    for number in 1 2 3 4 5; do
        "$folder/venv/bin/python" - "$folder/$number" "$1" <<'PYTHON'
import sys

import numpy as np
from safetensors.numpy import save_file

metadata = {f"key{number}": str(number) for number in range(int(sys.argv[2]))}
save_file({"b": np.ones(2), "a": np.zeros(3)}, sys.argv[1], metadata=metadata)
PYTHON
    done
    sha256sum "$folder"/[1-5] | cut -d ' ' -f 1 | sort -u | wc -l
}
one=$(files_of 1) eight=$(files_of 8)
echo "different files of 5: $one with one entry, $eight with eight"
[ "$one" = 1 ] && [ "$eight" -gt 1 ]
