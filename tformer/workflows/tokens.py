"""The work of `tformer viz-tokens`: the model's input, and the loss of each of its tokens."""

from __future__ import annotations

from dataclasses import replace

import torch

from tformer.data.batching.batch import Batch
from tformer.data.encoding import EncodedText
from tformer.data.shards.corpus import TokenCorpus
from tformer.decoding.prompts import task_prefix
from tformer.evaluation.lm import batches as window_batches
from tformer.evaluation.lm import load_batch, windows
from tformer.inside.options import TOKEN_HEADS, TokenOptions
from tformer.inside.reading import Inputs, read
from tformer.inside.tokens import TokenReport, read_tokens, words_of
from tformer.loading import Loaded, require_kind, target_reader
from tformer.nn.losses import IGNORED_LABEL
from tformer.support.errors import InputError
from tformer.workers.work import Work
from tformer.workflows.heads import BATCH_TOKENS, read_examples


def score_tokens(loaded: Loaded, options: TokenOptions, work: Work) -> TokenReport:
    """The predictions of the tokens of a text, or of the examples of data, by default the run's validation data.

    Raises InputError for a model that predicts no tokens, and for input that it cannot read.
    """
    require_kind(loaded.path, loaded.recipe, TOKEN_HEADS)
    text, source, encoded, notes = options.text, None, None, tuple[str, ...]()
    if text is None:
        batches, name = read_examples(loaded, options, work)
    else:
        if options.special_tokens:
            loaded = replace(loaded, tokenizer=loaded.text_tokenizer.reading_special())
        if loaded.model.is_encoder_decoder:
            source, text, encoded, batches, notes = _translation(loaded, text, options)
        else:
            encoded, batches = _text(loaded, text, options)
        name = f"a text of {len(encoded.ids):,} tokens"
    with work.part("predicting tokens", total=len(batches), unit="batches") as part:
        found = read_tokens(loaded, batches, top_k=options.top_k, work=part)
    if encoded is not None:
        if len(batches) > 1:  # each window begins with tokens of the one before it
            kept = found["rank"] >= 0
            kept[0] = True
            found = {name: values[kept] for name, values in found.items()}
        found["example"] = found["example"] * 0
    spans = (None,) * len(found["ids"]) if encoded is None else encoded.spans
    assert len(spans) == len(found["ids"])
    words, spaced = words_of(loaded, found), loaded.target_tokenizer.kind in ("word", "wordpiece")
    return TokenReport(loaded.identity, name, text, source, spans=spans, words=words, spaced=spaced, notes=notes,
                       **found)  # fmt: skip


def _text(loaded: Loaded, text: str, options: TokenOptions) -> tuple[EncodedText, list[Batch]]:
    """A text for a model of one stack; a decoder reads a long one in windows that overlap by half."""
    for flag in ("target", "prefix"):
        if getattr(options, flag) is not None:
            raise InputError(f"--{flag}: {loaded.path} is no encoder-decoder", hint="give the whole text with --text")
    encoded, length = loaded.reader.encode(text), loaded.recipe.seq_len
    if "lm" in loaded.model.heads:
        cut = window_batches(windows(len(encoded.ids), length, max(1, length // 2)), max(1, BATCH_TOKENS // length))
        corpus = TokenCorpus.from_ids(encoded.ids)
        return encoded, [load_batch(corpus, each) for each in cut]
    ids = _fitting(loaded, encoded, "text")
    return encoded, [Batch(input_ids=ids, labels=torch.full_like(ids, IGNORED_LABEL))]


def _translation(
    loaded: Loaded, text: str, options: TokenOptions
) -> tuple[str, str, EncodedText, list[Batch], tuple[str, ...]]:
    """(source, target, its tokens, batches, notes) of an encoder-decoder."""
    prefix, note = task_prefix(loaded.recipe, options.prefix)
    source, target, notes = prefix + text, options.target, () if note is None else (note,)
    source_ids = _fitting(loaded, loaded.reader.encode(source), "source")
    if target is None:
        reading = read(loaded, Inputs(source))
        target, notes = reading.texts["translation"], (*notes, *reading.notes)
    encoded = target_reader(loaded.recipe, loaded.target_tokenizer).encode(target)
    ids = _fitting(loaded, encoded, "target")
    given = torch.tensor([[*encoded.from_template[:-1], False]])  # the decoder's start; the end is predicted
    labels = ids.masked_fill(given, IGNORED_LABEL)[:, 1:]
    return source, target, encoded, [Batch(source_ids, decoder_input_ids=ids[:, :-1], labels=labels)], notes


def _fitting(loaded: Loaded, encoded: EncodedText, name: str) -> torch.Tensor:
    """The ids [1, T]. Raises InputError for more of them than the model reads, and for none."""
    count, longest = len(encoded.ids), loaded.model.max_seq_len
    if count > longest:
        raise InputError(f"the {name} has {count:,} tokens, but the model reads at most {longest:,}", hint="shorten it")
    if not count:
        raise InputError(f"the {name} has no tokens")
    return torch.tensor([encoded.ids])
