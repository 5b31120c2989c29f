"""One case for each objective: a tiny model, samples of unequal lengths, and batches of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tformer.build import build_model
from tformer.data.batching.batch import Batch
from tformer.data.shards.corpus import LEARNED, SECOND, Example
from tformer.model import Transformer
from tformer.nn.losses import IGNORED_LABEL
from tformer.objectives import OBJECTIVES, CausalLmOptions, build_objective
from tformer.objectives.base import Objective, ObjectiveContext, total_loss
from tformer.objectives.chat import ChatOptions
from tformer.objectives.contrastive import ContrastiveOptions
from tformer.objectives.denoising import DenoisingOptions
from tformer.objectives.distillation import Distillation
from tformer.objectives.dpo import DpoOptions
from tformer.objectives.labelled import ClassificationOptions, MultiLabelOptions, RegressionOptions
from tformer.objectives.masked_lm import MaskedLmOptions
from tformer.objectives.next_sentence import NextSentenceOptions
from tformer.objectives.question_answering import QuestionAnsweringOptions
from tformer.objectives.replaced_token import ReplacedTokenOptions
from tformer.objectives.seq2seq import Seq2SeqOptions
from tformer.objectives.similarity import SimilarityOptions
from tformer.objectives.span_corruption import SpanCorruptionOptions
from tformer.objectives.token_classification import TokenClassificationOptions
from tformer.recipe.model import Model
from tformer.tokenizer.special import DecoderTokens, SpecialIds
from tformer.training.teacher import layer_pairs

PAD, UNK, BOS, EOS, CLS, SEP, MASK, WORD, VOCAB, SEQ_LEN, CLASSES = 0, 1, 2, 3, 4, 5, 6, 7, 50, 32, 3
SENTINELS = tuple(range(VOCAB - 1, 39, -1))
SPECIAL = SpecialIds(pad=PAD, unk=UNK, bos=BOS, eos=EOS, cls=CLS, sep=SEP, mask=MASK, sentinels=SENTINELS)
LENGTHS = (9, 2, 17, 5)

KINDS: dict[str, tuple[Any, ...]] = {
    "causal_lm": (CausalLmOptions(weight=0.5),),
    "chat": (ChatOptions(weight=0.5),),
    "dpo": (DpoOptions(weight=0.5),),
    "masked_lm": (MaskedLmOptions(mask_share=0.3, weight=0.5),),
    "masked_lm,next_sentence": (MaskedLmOptions(mask_share=0.3), NextSentenceOptions(weight=0.5)),
    "replaced_token": (ReplacedTokenOptions(mask_share=0.3),),
    "classification": (ClassificationOptions(weight=0.25),),
    "multi_label": (MultiLabelOptions(weight=0.25),),
    "regression": (RegressionOptions(weight=0.25),),
    "token_classification": (TokenClassificationOptions(weight=0.25),),
    "question_answering": (QuestionAnsweringOptions(weight=0.25),),
    "contrastive": (ContrastiveOptions(weight=0.25),),
    "similarity": (SimilarityOptions(weight=0.25),),
    "seq2seq": (Seq2SeqOptions(weight=0.25),),
    "span_corruption": (SpanCorruptionOptions(noise_density=0.3, weight=0.5),),
    "denoising": (
        DenoisingOptions(delete_share=0.1, replace_share=0.2, permute_sentences=True, rotate_share=0.5, weight=0.5),
    ),
}
WHOLE = [kind for kind, options in KINDS.items() if options[0].objective.compares_batch]
"""The cases whose loss is no sum over the examples of a batch."""

DISTILLED = [kind for kind in KINDS if kind not in ("replaced_token", "dpo", *WHOLE)]
"""The cases that a student can learn from a teacher."""


@dataclass(frozen=True)
class Pair:
    """What objectives read of an example of aligned text."""

    source: np.ndarray
    target: np.ndarray
    task: int = 0


def pair_of_texts(first: Any, second: Any, label: Any = None) -> Example:
    ids = np.array([CLS, *first, SEP, *second, SEP])
    return Example(ids, token_type_ids=np.repeat([0, 1], [len(first) + 2, len(second) + 1]), label=label)


def samples_of(kind: str, lengths: tuple[int, ...] = LENGTHS, seed: int = 0) -> list[Any]:
    draw = np.random.default_rng([seed, *lengths])
    labels: dict[str, Any] = {
        "classification": draw.integers(CLASSES, size=len(lengths)),
        "multi_label": draw.integers(2, size=(len(lengths), CLASSES)),
        "regression": draw.normal(size=len(lengths)),
    }
    texts, others = ([draw.integers(WORD, 40, size=count) for count in some] for some in (lengths, lengths[::-1]))
    if kind == "seq2seq":
        return [
            Pair(np.array([BOS, *one, EOS]), np.array([*other, EOS])) for one, other in zip(texts, others, strict=True)
        ]
    if kind == "masked_lm,next_sentence":
        return [pair_of_texts(texts[i][:8], others[i][:8], i % 2) for i in range(len(lengths))]
    if kind in labels:
        return [
            Example(np.array([CLS, *one, SEP]), label=label) for one, label in zip(texts, labels[kind], strict=True)
        ]
    if kind in ("token_classification", "question_answering"):
        return [Example(np.array([CLS, *one, SEP]), label=marks_of(kind, len(one), draw)) for one in texts]
    if kind in WHOLE:
        scores = draw.normal(size=len(lengths)).tolist()
        sides = [[Example(np.array([CLS, *one, SEP]), label=scores[i]) for i, one in enumerate(side)]
                 for side in (texts, others)]  # fmt: skip
        return list(zip(*sides, strict=True))
    if kind == "chat":  # two of three ids are learned
        return [Example(one, label=LEARNED * (np.arange(len(one)) % 3 > 0)) for one in texts]
    if kind == "dpo":  # of each answer the first id is its prompt
        pairs = list(zip(texts, others, strict=True))
        marks = [[LEARNED * (np.arange(len(one)) > 0) + of for one, of in zip(pair, (0, SECOND), strict=True)]
                 for pair in pairs]  # fmt: skip
        return [Example(np.concatenate(ids), label=np.concatenate(of)) for ids, of in zip(pairs, marks, strict=True)]
    if kind in ("masked_lm", "replaced_token"):
        return [Example(np.array([CLS, *one, SEP])) for one in texts]
    return texts


def marks_of(kind: str, length: int, draw: np.random.Generator) -> np.ndarray:
    """Labels of every second token; or of a question of one token, and a context with an answer."""
    marks = np.full(length + 2, IGNORED_LABEL)
    if kind == "token_classification":
        marks[1:-1:2] = draw.integers(CLASSES, size=len(marks[1:-1:2]))
        return marks
    marks[0] = marks[2:-1] = 0
    start, stop = sorted(draw.integers(2, length + 1, size=2).tolist())
    marks[start] += 1
    marks[stop] += 2
    return marks


def context_of(**more: Any) -> ObjectiveContext:
    values = {"special_ids": SPECIAL, "seq_len": SEQ_LEN, "vocab_size": VOCAB, "frame": ((), (EOS,)), **more}
    return ObjectiveContext(**values)


def make(kind: str, *, context: dict[str, Any] | None = None, **options: Any) -> Objective:
    """The objective of a case; `options` replace those that it has."""
    more: dict[str, Any] = {}
    if "decoder" in OBJECTIVES[kind.split(",")[0]].parts and kind not in ("causal_lm", "chat", "dpo"):
        more["target"] = DecoderTokens(start=BOS, eos=EOS)
    if kind == "replaced_token":
        more["generator"] = model_of("masked_lm", seed=1)
    chosen = [replace(each, **{key: options[key] for key in options if hasattr(each, key)}) for each in KINDS[kind]]
    return build_objective(chosen, context_of(**more, **(context or {})))


def model_of(
    kind: str, *, layers: int = 2, d_model: int = 16, seed: int = 0, dropout: float = 0.0, **sizes: Any
) -> Transformer:
    """A model with random weights, whose learned positions refuse longer inputs; `sizes` of `build_model`."""
    torch.manual_seed(seed)
    stack = {"num_layers": layers, "num_heads": 2, "positions": {"kind": "learned"}, "feedforward": {"d_ff": 24},
             "dropout": dropout, "attention_dropout": dropout}  # fmt: skip
    kinds = [OBJECTIVES[each] for each in kind.split(",")]
    heads = [{"kind": each.head.kind} | ({"multi_label": True} if kind == "multi_label" else {}) for each in kinds]
    values = {"d_model": d_model, "max_seq_len": SEQ_LEN, "heads": heads,
              **dict.fromkeys(kinds[0].parts or ["encoder"], stack)}  # fmt: skip
    if len(kinds) > 1:
        values["embedding"] = {"token_types": 2}
    if "target_vocab_size" in sizes:
        values["tie"] = {"source_target": False}
    model = build_model(Model.model_validate(values), **{"vocab_size": VOCAB, "num_labels": CLASSES, **sizes})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.eval()


def batch_of(kind: str, lengths: tuple[int, ...] = LENGTHS, *, seed: int = 0, **context: Any) -> Batch:
    return make(kind, context=context).collate(samples_of(kind, lengths, seed), rng=np.random.default_rng(seed))


def distillation(kind: str, teacher: Transformer, **options: Any) -> Distillation:
    forward: Callable[..., Any] = options.pop("forward", teacher)
    weight = options.pop("weight", 1.0)  # of the objective that is distilled
    values: dict[str, Any] = {"temperature": 2.0, "alpha": 0.5, **options}
    for what in ("hidden", "attention"):
        values[f"{what}_pairs"] = layer_pairs(model_of(kind), teacher, what)
    teacher.requires_grad_(False)
    return Distillation(make(kind, weight=weight), forward, **values)


def rows_of(batch: Batch, rows: slice, *, parts: int = 1) -> Batch:
    """The rows of some examples. parts: equal parts of the batch, each with a row of every example."""
    return replace(batch._map(lambda each: torch.cat([part[rows] for part in each.chunk(parts)])), num_tokens=-1)


def step(objective: Objective, model: Transformer, batches: list[Batch]) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of a global batch in parts, as the training loop forms them."""
    counts: Counter[str] = sum((Counter(objective.label_count(batch)) for batch in batches), Counter())
    model.zero_grad()
    torch.manual_seed(0)  # of the tokens that ELECTRA's generator draws
    loss = 0.0
    for batch in batches:
        part = total_loss(objective.loss(model, batch).terms, counts)
        part.backward()
        loss += part.item()
    return loss, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def unpadded(batch: Batch) -> list[tuple[list[int], list[int]]]:
    """(source, labels) of every row."""
    assert batch.input_ids is not None and batch.labels is not None
    mask = torch.ones_like(batch.input_ids) if batch.attention_mask is None else batch.attention_mask
    return [
        (ids[real.bool()].tolist(), labels[labels != IGNORED_LABEL].tolist())
        for ids, real, labels in zip(batch.input_ids, mask, batch.labels, strict=True)
    ]
