#!/usr/bin/env bash
# transformers 5.24.0, gguf 0.19.0: the tokenizer of a GGUF file with `tokenizer.ggml.pre` = smollm is read as GPT-2's.
#
# llama.cpp cuts every digit apart for this name (SmolLM's files have it). AutoTokenizer.from_pretrained(gguf_file=...)
# builds other splits for qwen2, llama-bpe and tekken, but for smollm falls back to GPT-2's pattern without a message,
# so that a merge of digits, which SmolLM's own tokenizer can never use, is used.
#
# Seen:    gpt-2 ['123', '4'], smollm ['123', '4'], qwen2 ['1', '2', '3', '4']
# A guess: a name that the loader does not know is refused or warned of, as llama.cpp does.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet transformers==5.24.0 gguf==0.19.0 torch==2.13.0 numpy
"$folder/venv/bin/python" - "$folder" <<'PYTHON' 2>/dev/null
import sys

import gguf
import numpy as np
from transformers import AutoTokenizer

PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
ALPHABET = [chr(byte) for byte in PRINTABLE] + [chr(256 + n) for n in range(256 - len(PRINTABLE))]
TOKENS = ["<|endoftext|>", *ALPHABET, "12", "123"]
cut = {}
for name in ("gpt-2", "smollm", "qwen2"):
    writer = gguf.GGUFWriter(f"{sys.argv[1]}/{name}.gguf", "llama")
    for add, value in (
        (writer.add_context_length, 32), (writer.add_embedding_length, 8), (writer.add_block_count, 1),
        (writer.add_feed_forward_length, 8), (writer.add_head_count, 1), (writer.add_head_count_kv, 1),
        (writer.add_layer_norm_rms_eps, 1e-5), (writer.add_vocab_size, len(TOKENS)),
        (writer.add_tokenizer_model, "gpt2"), (writer.add_tokenizer_pre, name), (writer.add_token_list, TOKENS),
        (writer.add_token_types, [3] + [1] * (len(TOKENS) - 1)), (writer.add_token_merges, ["1 2", "12 3"]),
        (writer.add_bos_token_id, 0), (writer.add_eos_token_id, 0),
    ):
        add(value)
    writer.add_tensor("token_embd.weight", np.zeros((len(TOKENS), 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], gguf_file=f"{name}.gguf")
    cut[name] = tokenizer.convert_ids_to_tokens(tokenizer("1234", add_special_tokens=False).input_ids)
print(cut)
assert cut == {"gpt-2": ["123", "4"], "smollm": ["123", "4"], "qwen2": ["1", "2", "3", "4"]}
PYTHON
