#!/usr/bin/env bash
# lm_eval 0.4.13 (hf backend, transformers 5.24.0): the perplexity of a text depends on the batch size.
#
# HFLM computes windows of a batch that have equal inputs once (logits_cache=True, the default). Windows of a rolling
# log-likelihood can have equal inputs and continuations of different lengths: the whole windows and the shorter last
# one of a text that repeats itself. For the shorter one the first logits are taken in place of the last ones.
#
# Seen:    -89.18 in batches of 4, -94.87 one by one, -94.87 in batches of 4 with logits_cache=False
# A guess: a cache and a batch size change the speed, and numbers by rounding at most.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet lm_eval==0.4.13 transformers==5.24.0 torch==2.13.0 accelerate
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - <<'PYTHON' 2>/dev/null
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

table = Tokenizer(models.WordLevel({f"w{number}": number for number in range(16)}, unk_token="w0"))
table.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=table, unk_token="w0", bos_token="w1", eos_token="w2", pad_token="w2"
)
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(
    vocab_size=16, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
    max_position_embeddings=8, initializer_range=0.5, bos_token_id=1, eos_token_id=2,
)).eval()
TEXT = " ".join(["w5", "w6", "w7", "w8"] * 5)  # windows of 8, 8 and 4 tokens, the last with the input of the second


def log_likelihood(batch_size, cache):
    harness = HFLM(
        pretrained=model, tokenizer=tokenizer, max_length=8, batch_size=batch_size, logits_cache=cache, device="cpu"
    )
    [found] = harness.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, (TEXT,), 0)], disable_tqdm=True)
    return found


batched, single, uncached = log_likelihood(4, True), log_likelihood(1, True), log_likelihood(4, False)
print(f"batches of 4: {batched:.2f}; one by one: {single:.2f}; batches of 4 without the cache: {uncached:.2f}")
assert abs(single - uncached) < 1e-3 < 1 < abs(batched - single)
PYTHON
