#!/usr/bin/env bash
# peft 0.21.2 with transformers 5.24.0: a T5 whose table of tokens is in `modules_to_save` trains nothing of it.
#
# The table of T5 has one parameter in three modules: `shared` (which get_input_embeddings returns),
# `encoder.embed_tokens` and `decoder.embed_tokens`. Since version 5 these are three modules, and the two stacks read
# their own. LoraConfig(modules_to_save=["shared"]) puts a copy in the place of `shared`, which no forward pass reads:
# its gradient stays None, and the logits stay the same whatever numbers it holds. There is no warning, the copy counts
# among the trainable parameters and is saved. `modules_to_save=["embed_tokens"]` trains two copies, one a side.
#
# Seen:   shared: gradient None, logits change by 0.0 when the copy is replaced; embed_tokens: both copies have gradients
# A guess: the module that get_input_embeddings returns is the one that a forward pass reads, as in version 4.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet peft==0.21.2 transformers==5.24.0 torch==2.13.0
"$folder/venv/bin/python" - <<'PYTHON'
import warnings

import torch
from peft import LoraConfig, get_peft_model
from transformers import T5Config, T5ForConditionalGeneration

warnings.filterwarnings("ignore")
SIZES = {"vocab_size": 40, "d_model": 8, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2}
IDS = torch.arange(6).unsqueeze(0)


def trained(name):
    """(whether each copy of the table has a gradient, the change of the logits when all copies are replaced)."""
    torch.manual_seed(0)
    base = T5ForConditionalGeneration(T5Config(**SIZES, decoder_start_token_id=0, dropout_rate=0.0))
    assert base.get_input_embeddings() is base.shared
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["q"], modules_to_save=[name]))
    model(input_ids=IDS, labels=IDS).loss.backward()
    copies = {key: each for key, each in model.named_parameters() if ".modules_to_save." in key}
    gradients = {key: each.grad is not None for key, each in copies.items()}
    with torch.no_grad():
        before = model(input_ids=IDS, decoder_input_ids=IDS).logits
        for each in copies.values():
            each.normal_()
        after = model(input_ids=IDS, decoder_input_ids=IDS).logits
    return gradients, float((before - after).abs().max())


for name in ("shared", "embed_tokens"):
    gradients, change = trained(name)
    print(name, "gradients", gradients, "change of the logits", change)
    if name == "shared":
        assert list(gradients.values()) == [False] and change < 1e-5, (gradients, change)
    else:
        assert list(gradients.values()) == [True, True] and change > 1e-2, (gradients, change)
PYTHON
