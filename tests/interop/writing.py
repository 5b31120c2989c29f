"""The same small model twice, and what each writes after the same texts: `generate`, and ours from text to text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers

from tests.interop.classes import note
from tests.interop.parity import imported, saved
from tformer.decoding.generate import generate
from tformer.decoding.settings import BeamSettings, GenerationSettings
from tformer.decoding.translate import Continuer, Translator
from tformer.model import Transformer
from tformer.tokenizer import Tokenizer
from tformer.tokenizer.special import DecoderTokens

VOCABULARY, PAD, EOS = 48, 0, 2
ENDS = {"pad_token_id": PAD, "eos_token_id": EOS}
SIDES = {
    f"{side}_{name}": value
    for side, layers in (("encoder", 3), ("decoder", 2))
    for name, value in {"layers": layers, "attention_heads": 4, "ffn_dim": 28}.items()
}


def gpt2() -> Any:
    sizes = {"vocab_size": VOCABULARY, "n_positions": 40, "n_embd": 20, "n_layer": 2, "n_head": 5}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=EOS, **ENDS))


def t5() -> Any:
    sizes = {"vocab_size": VOCABULARY, "d_model": 16, "d_kv": 6, "d_ff": 24, "num_layers": 2}
    buckets = {"num_heads": 3, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 12}
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(**sizes, **buckets, **ENDS, decoder_start_token_id=PAD)
    )


def bart() -> Any:
    sizes = {"vocab_size": VOCABULARY, "d_model": 16, "max_position_embeddings": 40, **SIDES}
    starts = {"bos_token_id": 1, "decoder_start_token_id": EOS, "forced_bos_token_id": None}
    return transformers.BartForConditionalGeneration(
        transformers.BartConfig(**sizes, **ENDS, **starts, forced_eos_token_id=None)
    )


def led() -> Any:
    """Its decoder has fewer positions than its encoder; of every source the first token is global."""
    sizes = {"vocab_size": VOCABULARY, "d_model": 16, "attention_window": [4, 8, 4], **SIDES}
    sizes |= {"max_encoder_position_embeddings": 60, "max_decoder_position_embeddings": 40}
    return transformers.LEDForConditionalGeneration(
        transformers.LEDConfig(**sizes, **ENDS, bos_token_id=1, decoder_start_token_id=EOS)
    )


def marian() -> Any:
    sizes = {"vocab_size": VOCABULARY, "d_model": 16, "max_position_embeddings": 40, **SIDES}
    return transformers.MarianMTModel(
        transformers.MarianConfig(
            **sizes, **ENDS, scale_embedding=True, decoder_start_token_id=PAD, forced_eos_token_id=None
        )
    )


def umt5() -> Any:
    config = transformers.UMT5Config(**{**t5().config.to_dict(), "model_type": "umt5"})
    return transformers.UMT5ForConditionalGeneration(config)


def blenderbot() -> Any:
    sizes = {"vocab_size": VOCABULARY, "d_model": 16, "max_position_embeddings": 40, **SIDES}
    starts = {"bos_token_id": 1, "decoder_start_token_id": 1, "forced_eos_token_id": None}
    return transformers.BlenderbotForConditionalGeneration(
        transformers.BlenderbotConfig(**sizes, **ENDS, **starts, encoder_no_repeat_ngram_size=0)
    )


def blenderbot_small() -> Any:
    values = {**blenderbot().config.to_dict(), "model_type": "blenderbot-small"}
    return transformers.BlenderbotSmallForConditionalGeneration(transformers.BlenderbotSmallConfig(**values))


def m2m100() -> Any:
    sizes = {"vocab_size": VOCABULARY, "d_model": 16, "max_position_embeddings": 40, **SIDES}
    return transformers.M2M100ForConditionalGeneration(
        transformers.M2M100Config(**sizes, **ENDS, decoder_start_token_id=EOS, scale_embedding=False)
    )


def fsmt() -> Any:
    sizes = {"d_model": 16, "max_position_embeddings": 40, "scale_embedding": False, **SIDES}
    sizes |= {"src_vocab_size": VOCABULARY, "tgt_vocab_size": VOCABULARY}
    reference = transformers.FSMTForConditionalGeneration(
        transformers.FSMTConfig(**sizes, **ENDS, decoder_start_token_id=EOS, forced_eos_token_id=None)
    )
    for stack in (reference.model.encoder, reference.model.decoder):
        stack.embed_positions.weight.requires_grad_(False)
    return reference


SCALES = {"encoder_attn": 0.3, "EncDec": 0.3, "attn": 0.8, "Attention": 0.8, "fc": 0.6, "mlp": 0.6, "Dense": 0.6}


def sharpened(reference: Any, *, seed: int) -> Any:
    """Large random weights of proportions that give varied texts, and ends of sequence that are likely now and then."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in reference.named_parameters():
            if not value.requires_grad:  # Marian's sinusoids
                continue
            noise = torch.randn(value.shape, generator=generator)
            if value.dim() == 1:
                value.copy_(0.1 * noise + (1.0 if name.endswith("weight") else 0.0))
            else:
                value.copy_(noise * next((scale for part, scale in SCALES.items() if part in name), 1.0))
        if hasattr(reference, "final_logits_bias"):
            reference.final_logits_bias.copy_(torch.randn(1, VOCABULARY, generator=generator))
            reference.final_logits_bias[0, EOS] += 2.0
        if hasattr(reference, "shared"):  # T5 divides by sqrt(d) what the others do not
            reference.shared.weight *= 1.5
            reference.shared.weight[EOS] *= 1.5
    return reference.eval()


@dataclass(frozen=True)
class Pair:
    """The same model twice. `start`: what the decoder starts from; None: a decoder alone."""

    theirs: Any
    ours: Transformer
    start: int | None


MODELS: dict[str, tuple[Callable[[], Any], int | None, int]] = {
    "gpt2": (gpt2, None, 36),
    "t5": (t5, PAD, 19),
    "bart": (bart, EOS, 2),
    "marian": (marian, PAD, 35),
}
FURTHER: dict[str, tuple[Callable[[], Any], int | None, int]] = {
    "umt5": (umt5, PAD, 19),
    "blenderbot": (blenderbot, 1, 2),
    "blenderbot-small": (blenderbot_small, 1, 2),
    "m2m100": (m2m100, EOS, 2),
    "fsmt": (fsmt, EOS, 2),
    "led": (led, EOS, 2),
}
"""Relatives of these, for which a few of the checks are enough."""


def make_pair(name: str, folder: Path) -> Pair:
    make, start, seed = (MODELS | FURTHER)[name]
    reference = sharpened(make(), seed=seed)
    model, _ = imported(saved(reference, folder))
    return Pair(reference, model, start)


def word_tokenizer() -> Tokenizer:
    """A word for every id; the end of sequence alone is special."""
    rust = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w3"))
    rust.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    rust.add_special_tokens([f"w{EOS}"])
    return Tokenizer.from_json(rust.to_str())


TOKENIZER = word_tokenizer()
TEXTS = [
    " ".join(
        f"w{token}"
        for token in torch.randint(4, VOCABULARY, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    )
    for length in (7, 3, 11, 1, 5)
]

Ranked = list[tuple[tuple[int, ...], float]]  # ids and score
Written = list[Ranked]  # the n best of each text


def theirs(pair: Pair, *, first: int | None = None, **options: Any) -> Written:
    """New tokens until the end, and scores (0 where there are none)."""
    rows = [TOKENIZER.encode(text) for text in TEXTS]
    longest = max(map(len, rows))
    fill = [[PAD] * (longest - len(row)) for row in rows]
    left = pair.start is None
    ids = torch.tensor([blank + row if left else row + blank for row, blank in zip(rows, fill, strict=True)])
    mask = torch.tensor(
        [[0] * len(b) + [1] * len(r) if left else [1] * len(r) + [0] * len(b) for r, b in zip(rows, fill, strict=True)]
    )
    if pair.theirs.config.model_type == "led":
        options["global_attention_mask"] = (torch.arange(longest) == 0).long().expand(len(rows), -1)
    found = pair.theirs.generate(
        input_ids=ids, attention_mask=mask, do_sample=False, return_dict_in_generate=True, output_scores=True, **options
    )
    note(type(pair.theirs).__name__, generation="beams" if options.get("num_beams", 1) > 1 else "greedy")
    ends = options.get("eos_token_id", [EOS])
    known = (longest if left else 1) + (first is not None)
    scores = getattr(found, "sequences_scores", None)
    written = [
        (until_end(row[known:], ends), float(scores[place]) if scores is not None else 0.0)
        for place, row in enumerate(found.sequences.tolist())
    ]
    n = len(written) // len(rows)
    return [written[place : place + n] for place in range(0, len(written), n)]


def until_end(ids: list[int], ends: list[int]) -> tuple[int, ...]:
    return tuple(ids[: next((place + 1 for place, token in enumerate(ids) if token in ends), len(ids))])


def different_texts(ranked: Ranked, ends: Sequence[int]) -> Ranked:
    """The best of each text."""
    first: dict[tuple[int, ...], tuple[tuple[int, ...], float]] = {}
    for ids, score in ranked:
        first.setdefault(tuple(token for token in ids if token not in ends), (ids, score))
    return list(first.values())


def ours(pair: Pair, settings: BeamSettings | GenerationSettings, **forced: int) -> Written:
    """By the public ways from texts to texts. Nothing is ruled out unless asked for, as of an imported folder."""
    settings = replace(settings, eos_id=EOS, suppress_tokens=settings.suppress_tokens or ())
    if pair.start is not None:
        target = DecoderTokens(pair.start, EOS, **forced)
        translator = Translator([pair.ours], TOKENIZER, TOKENIZER, settings=settings, target=target, max_source=40)
        found = translator.translate(TEXTS, batch_size=3)
        return [[(one.ids, one.score) for one in ones] for ones in found]
    settings = replace(settings, **forced)
    if isinstance(settings, BeamSettings):
        found = Continuer([pair.ours], TOKENIZER, settings).continue_texts(TEXTS, batch_size=3)
        return [[(one.ids, one.score) for one in ones] for ones in found]
    prompts = [TOKENIZER.encode(text) for text in TEXTS]
    suppressed = settings.suppress_tokens or ()
    return [[(one.ids, 0.0) for one in ones] for ones in generate(pair.ours, prompts, settings, suppressed=suppressed)]
