#!/usr/bin/env bash
# ctranslate2 4.8.5: `include_prompt_in_result` of Generator.generate_batch changes what is generated, not only what is
# returned.
#
# With the default (True) the prompt counts towards max_length, and one token more is written: a prompt of 5 tokens with
# max_length=12 gives 13 in all, 8 new ones. With False the same call gives 12 new tokens. With a repetition penalty the
# new tokens themselves differ: with False it leaves out the tokens of the prompt.
#
# Seen:    True: 13 tokens with the prompt; False: 12 without it; other texts of 12 tokens with repetition_penalty=1.5
# A guess: the flag says whether the prompt is put before the same new tokens.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet ctranslate2==4.8.5 transformers==5.24.0 torch==2.13.0
"$folder/venv/bin/python" - "$folder" <<'PYTHON'
import sys

import ctranslate2
import torch
from ctranslate2.converters import TransformersConverter
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

source, target = sys.argv[1] + "/hf", sys.argv[1] + "/ct2"
table = Tokenizer(models.WordLevel({f"w{number}": number for number in range(32)}, unk_token="w0"))
table.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
PreTrainedTokenizerFast(
    tokenizer_object=table, unk_token="w0", bos_token="w1", eos_token="w2"
).save_pretrained(source)
torch.manual_seed(0)
GPT2LMHeadModel(GPT2Config(
    vocab_size=32, n_embd=32, n_layer=2, n_head=2, n_positions=64, initializer_range=0.3,
    bos_token_id=1, eos_token_id=2,
)).save_pretrained(source)
TransformersConverter(source).convert(target)
generator = ctranslate2.Generator(target, device="cpu", compute_type="float32")
PROMPT = ["w5", "w9", "w7", "w7", "w3"]


def greedy(with_prompt, max_length, penalty=1.0):
    [found] = generator.generate_batch(
        [PROMPT], sampling_topk=1, beam_size=1, max_length=max_length, repetition_penalty=penalty,
        include_prompt_in_result=with_prompt,
    )
    return found.sequences[0][len(PROMPT) if with_prompt else 0 :]


sizes = len(greedy(True, 12)), len(greedy(False, 12))
print("new tokens of max_length=12 with and without the prompt in the result:", *sizes)
long, short = greedy(True, 16, 1.5), greedy(False, 12, 1.5)
print("with a repetition penalty:", *long, "and", *short)
assert sizes == (8, 12) and greedy(True, 16) == greedy(False, 12) and len(long) == len(short) == 12 and long != short
PYTHON
