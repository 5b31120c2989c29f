#!/usr/bin/env bash
# tokenizers 0.23.3: training WordPiece or Unigram on the same texts gives another tokenizer in every process; BPE and
# WordLevel give the same one. There is no seed to set.
#
# WordPiece finds the same pieces and numbers the continuations of single characters (##a) differently, so that a model
# trained with one file reads other ids with the next. Unigram finds the same pieces here, with other ids or scores. One
# thread does not help (RAYON_NUM_THREADS=1): the order is that of a hash table with random keys.
#
# Seen:    of 4 processes each: BPE 1 tokenizer, WordLevel 1, WordPiece 4, Unigram 4 (of the same pieces)
# A guess: training is a function of texts and settings, at least with one thread.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet tokenizers==0.23.3
cat > "$folder/train.py" <<'PYTHON'
import hashlib
import json
import pydoc_data.topics

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

texts = [line for name in sorted(pydoc_data.topics.topics) for line in pydoc_data.topics.topics[name].splitlines()]
common = {"vocab_size": 800, "show_progress": False, "special_tokens": ["<unk>"]}
for name, model, trainer in (
    ("BPE", models.BPE(), trainers.BpeTrainer(**common)),
    ("WordLevel", models.WordLevel(unk_token="<unk>"), trainers.WordLevelTrainer(**common)),
    ("WordPiece", models.WordPiece(unk_token="<unk>"), trainers.WordPieceTrainer(**common)),
    ("Unigram", models.Unigram(), trainers.UnigramTrainer(unk_token="<unk>", **common)),
):
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator(texts, trainer)
    whole = hashlib.sha256(tokenizer.to_str().encode()).hexdigest()
    pieces = hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab())).encode()).hexdigest()
    print(name, whole[:12], pieces[:12])
PYTHON
export RAYON_NUM_THREADS=1
for _ in 1 2 3 4; do "$folder/venv/bin/python" "$folder/train.py"; done | sort | tee "$folder/found"
different() { grep "^$1 " "$folder/found" | cut -d ' ' -f "$2" | uniq | wc -l; }
[ "$(different BPE 2)" = 1 ] && [ "$(different WordLevel 2)" = 1 ]
[ "$(different WordPiece 2)" -gt 1 ] && [ "$(different WordPiece 3)" = 1 ]
[ "$(different Unigram 2)" -gt 1 ]
