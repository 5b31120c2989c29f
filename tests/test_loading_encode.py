"""`run.encode`: Python gives the model the ids that the commands give it, so that scores are equal."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tformer
from tests.interop.parity import randomized
from tests.interop.test_interop_tokenizers import llama
from tests.random_runs import random_run
from tformer.support.errors import InputError

STACK = "{num_layers: 1, num_heads: 2, feedforward: {d_ff: 16}}"
TRANSLATOR = f"""
schema: 1
arch: transformer
model: {{d_model: 8, max_seq_len: 32, encoder: {STACK}, decoder: {STACK}, heads: [{{kind: lm}}], init: {{std: 0.5}}}}
objectives: [{{kind: seq2seq}}]
training: {{precision: fp32}}
"""
TAGGER = f"""
schema: 1
arch: bert
model: {{d_model: 8, max_seq_len: 32, encoder: {STACK}, heads: [{{kind: classifier, num_labels: 2}}]}}
objectives: [{{kind: classification}}]
data: {{labels: [no, yes]}}
training: {{precision: fp32}}
"""


def written(folder: Path, recipe_text: str, template: str, **options: Any) -> Path:
    return random_run(folder, recipe_text, letters="abcdefgh .\n", template=template, step=1, **options)


def score(cli: Callable[..., Any], path: Path, folder: Path, source: str, target: str) -> float:
    (folder / "source.txt").write_text(source + "\n")
    (folder / "target.txt").write_text(target + "\n")
    files = ("--source", folder / "source.txt", "--target", folder / "target.txt")
    outcome = cli("evaluate", path, *files, "--score", "--json")
    assert outcome.code == 0, outcome.err
    return float(json.loads(outcome.out)["logprob"])


def test_a_translation_scores_the_same_in_python_as_with_the_command(cli: Callable[..., Any], tmp_path: Path) -> None:
    path = written(tmp_path, TRANSLATOR, "seq2seq")
    run = tformer.load(path)
    read, predicted = run.encode_target("bad")
    logits = run.model(torch.tensor([run.encode("a cab.")]), decoder_input_ids=torch.tensor([read])).logits
    found = logits[0].log_softmax(-1)[range(len(predicted)), predicted].sum().item()
    assert found == pytest.approx(score(cli, path, tmp_path, "a cab.", "bad"), abs=1e-4)
    bare = run.model(torch.tensor([run.text_tokenizer.encode("a cab.")]), decoder_input_ids=torch.tensor([read]))
    assert abs(bare.logits[0].log_softmax(-1)[range(len(predicted)), predicted].sum().item() - found) > 1e-3


def test_a_continuation_scores_the_same_in_python_as_with_the_command(cli: Callable[..., Any], tmp_path: Path) -> None:
    """A tokenizer that begins every text with <s>, as Llama's does."""
    import transformers

    folder = llama(tmp_path / "llama")
    size = len(json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"])
    config = transformers.LlamaConfig(
        vocab_size=size, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=64, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    randomized(transformers.LlamaForCausalLM(config)).save_pretrained(folder)  # type: ignore[operator]
    run = tformer.load(folder)
    prompt, whole = run.encode("the"), run.encode("the cats")
    assert prompt[0] == 1 and prompt[1:] == run.text_tokenizer.encode("the")
    logprobs = run.model(torch.tensor([whole[:-1]])).logits[0].log_softmax(-1)
    wanted = whole[len(prompt) :]
    found = logprobs[len(prompt) - 1 :][range(len(wanted)), wanted].sum().item()
    assert found == pytest.approx(score(cli, folder, tmp_path, "the", " cats"), abs=1e-4)


def test_a_classifier_gives_the_probabilities_of_the_command(cli: Callable[..., Any], tmp_path: Path) -> None:
    path = written(tmp_path, TAGGER, "bert")
    run = tformer.load(path)
    special = run.text_tokenizer.special
    ids = run.encode("a bad cab")
    assert (ids[0], ids[-1]) == (special.cls, special.sep)
    logits = run.model(torch.tensor([ids])).logits
    document = json.loads(cli("classify", path, "--text", "a bad cab", "--json").out)
    probability = logits.softmax(-1).max().item()
    assert max(document["probabilities"].values()) == pytest.approx(probability, abs=1e-4)
    with pytest.raises(InputError, match="only an encoder-decoder has a target side"):
        run.encode_target("a")


@pytest.mark.parametrize(("heads", "ends"), [("{kind: classifier, num_labels: 2, pooling: eos}", True), ("", False)])
def test_a_decoder_reads_the_end_of_a_text_only_where_training_adds_it(
    cli: Callable[..., Any], tmp_path: Path, heads: str, ends: bool
) -> None:
    """A classifier reads the end of text, a body without a head a text that may go on; in pictures of attention too."""
    from tformer.inside.reading import Inputs, read

    recipe = TAGGER.replace("encoder:", "decoder:").replace("[{kind: classifier, num_labels: 2}]", f"[{heads}]")
    path = written(tmp_path, recipe, "gpt")
    run = tformer.load(path)
    ids, tokenizer = run.encode("a bad cab"), run.text_tokenizer
    assert ids == [*tokenizer.encode("a bad cab"), *([tokenizer.special.eos] if ends else [])]
    assert read(run, Inputs(text="a bad cab")).inputs["input_ids"].tolist() == [ids]
    np.testing.assert_allclose(
        run.embed("a bad cab", pooling="eos"), run.model(torch.tensor([ids])).hidden[0, -1].detach(), atol=1e-5
    )
    if ends:
        document = json.loads(cli("classify", path, "--text", "a bad cab", "--json").out)
        expected = run.model(torch.tensor([ids])).logits.softmax(-1).max().item()
        assert max(document["probabilities"].values()) == pytest.approx(expected, abs=1e-4)
    else:
        with pytest.raises(InputError, match="reads one text, not pairs"):
            read(run, Inputs(text="a", text2="b"))


def test_decode_reverses_encode(tmp_path: Path) -> None:
    run = tformer.load(written(tmp_path, TAGGER, "bert"))
    assert run.decode(run.encode("a bad cab")) == "a bad cab"
