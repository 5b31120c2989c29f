#!/usr/bin/env bash
# ctranslate2 4.8.5 with transformers 5.24.0: a Llama whose RoPE has the type llama3 is converted without a message, and
# computes as if it had no scaling at all, at every length.
#
# TransformersConverter writes a model whose logits equal those of the same weights with plain RoPE; the keys factor and
# original_max_position_embeddings of Llama 3.1 and later have no effect.
#
# Seen:    largest difference to the model 7.86, to the same weights without scaling 6e-6
# A guess: Llama 3.1 is supported, so its frequencies are scaled, or the converter refuses what it does not apply.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet ctranslate2==4.8.5 transformers==5.24.0 torch==2.13.0
"$folder/venv/bin/python" - "$folder" <<'PYTHON'
import sys

import ctranslate2
import numpy as np
import torch
from ctranslate2.converters import TransformersConverter
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

source, target = sys.argv[1] + "/hf", sys.argv[1] + "/ct2"
words = [f"w{number}" for number in range(64)]
table = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="w0"))
table.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
PreTrainedTokenizerFast(
    tokenizer_object=table, unk_token="w0", bos_token="w1", eos_token="w2"
).save_pretrained(source)
SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
         "num_attention_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.3,
         "bos_token_id": 1, "eos_token_id": 2}
SCALED = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
torch.manual_seed(0)
scaled = LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=SCALED)).eval()
plain = LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
plain.load_state_dict(scaled.state_dict())
scaled.save_pretrained(source)
TransformersConverter(source).convert(target)
ids = torch.randint(3, 64, (1, 48))
text = [words[number] for number in ids[0].tolist()]
generator = ctranslate2.Generator(target, device="cpu", compute_type="float32")
found = np.asarray(generator.forward_batch([text]))
with torch.no_grad():
    to_model, to_plain = (float(np.abs(found - each(ids).logits.numpy()).max()) for each in (scaled, plain))
print(f"largest difference to the model {to_model:.3g}, to the same weights without scaling {to_plain:.3g}")
assert to_plain < 1e-3 < 1 < to_model
PYTHON
