#!/usr/bin/env bash
# peft 0.21.2 with transformers 5.24.0: `ensure_weight_tying=True` ties by the name of the module, not by the tie.
#
# LoraConfig(modules_to_save=[TABLE], ensure_weight_tying=True) on a model whose output is its table of tokens:
#   Llama, TABLE embed_tokens  one trained table for input and output, as the name says
#   GPT-2, TABLE wte           the input alone is trained; the output keeps the base's table (a warning says that "no
#                              tied modules are added in either modules_to_save or target_modules")
#   GPT-2, TABLE lm_head       one trained table again, the input's
# The names that count are the two of peft.utils.constants.EMBEDDING_LAYER_NAMES: embed_tokens and lm_head. The list that
# the caller gave as modules_to_save is changed in place: ["lm_head"] becomes ["transformer.wte"].
#
# Seen:   llama embed_tokens tied True; gpt2 wte tied False; gpt2 lm_head tied True, list ['transformer.wte']
# A guess: the flag ties the tables of every model whose config says tie_word_embeddings, and the list stays as it was.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet peft==0.21.2 transformers==5.24.0 torch==2.13.0
"$folder/venv/bin/python" - <<'PYTHON'
import warnings

from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

warnings.filterwarnings("ignore")


def gpt2():
    sizes = {"vocab_size": 40, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 16}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def llama():
    sizes = {"vocab_size": 40, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, tie_word_embeddings=True))


found = {}
for make, target, name in ((llama, "q_proj", "embed_tokens"), (gpt2, "c_attn", "wte"), (gpt2, "c_attn", "lm_head")):
    base, names = make(), [name]
    assert base.get_input_embeddings().weight is base.get_output_embeddings().weight
    config = LoraConfig(r=2, target_modules=[target], modules_to_save=names, ensure_weight_tying=True)
    model = get_peft_model(base, config)
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    found[make.__name__, name] = tied, names
    print(make.__name__, name, "tied", tied, "the caller's list", names)
assert [tied for tied, _ in found.values()] == [True, False, True], found
assert found["gpt2", "lm_head"][1] == ["transformer.wte"], found
PYTHON
