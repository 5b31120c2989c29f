"""Special tokens: their names and ids, and the templates that place them around a text.

A template follows its family's published convention:

    bert     [CLS] a [SEP]       [CLS] a [SEP] b [SEP]      second text and its [SEP] have type 1
    roberta  <s> a </s>          <s> a </s></s> b </s>      all types 0
    t5       a </s>              a </s> b </s>              sentinels last: <extra_id_0> has the highest id
    seq2seq  [START] a [END]     [START] a [END] b [END]    second text and its [END] have type 1
    gpt      a                   a b                        <|endoftext|> both begins and ends a document
    chatml   a                   a b                        as gpt; <|im_start|> and <|im_end|> are around messages
    none     a                   a b

Ids of special tokens start at 0 in the order listed; sentinels are at the end of the vocabulary, as in T5.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import processors

from tformer.support.errors import InputError
from tformer.tokenizer.options import TemplateName, TokenizerOptions


@dataclass(frozen=True)
class SpecialIds:
    """Ids of the special tokens by role; None where the vocabulary has no such token."""

    pad: int | None = None
    bos: int | None = None
    eos: int | None = None
    unk: int | None = None
    cls: int | None = None
    sep: int | None = None
    mask: int | None = None
    sentinels: tuple[int, ...] = ()  # the id of <extra_id_N> at index N

    @property
    def all(self) -> tuple[int, ...]:
        """Every id that has a role."""
        roles = (self.pad, self.bos, self.eos, self.unk, self.cls, self.sep, self.mask, *self.sentinels)
        return tuple(token for token in roles if token is not None)


@dataclass(frozen=True)
class DecoderTokens:
    """First and last tokens of a decoder beside an encoder.

    Labels are [forced_bos]? text eos; the decoder reads start and the labels except the last. A text that decoding cuts
    at its maximum length ends with `forced_eos` in place of its last token.
    """

    start: int
    eos: int
    forced_bos: int | None = None
    forced_eos: int | None = None

    @property
    def prefix(self) -> tuple[int, ...]:
        """The tokens from which decoding starts."""
        return (self.start,) if self.forced_bos is None else (self.start, self.forced_bos)


def decoder_tokens(
    special: SpecialIds,
    *,
    start: int | None = None,
    eos: int | None = None,
    forced_bos: int | None = None,
    forced_eos: int | None = None,
) -> DecoderTokens:
    """The ids given, else the vocabulary's: start is bos, else pad (T5, arXiv 1910.10683), else eos.

    Raises InputError for a vocabulary without an end-of-sequence token.
    """
    end = special.eos if eos is None else eos
    if end is None:
        raise InputError(
            "a decoder beside an encoder needs a tokenizer with an end-of-sequence token, this one has none",
            hint="train one with --template seq2seq, t5 or roberta (tokenizer.train.template)",
        )
    begin = next(token for token in (start, special.bos, special.pad, end) if token is not None)
    return DecoderTokens(begin, end, forced_bos, forced_eos)


@dataclass(frozen=True)
class Template:
    """A family's special tokens, and the post-processor that places them around a text."""

    tokens: tuple[str, ...]
    processor: Callable[[Mapping[str, int]], Any] | None = None  # ids by token -> post-processor
    unk: str = "<unk>"
    sentinels: int = 0


def _placing(single: str, pair: str) -> Callable[[Mapping[str, int]], Any]:
    """A function that builds the post-processor from two templates in the notation of `tokenizers`."""

    def build(ids: Mapping[str, int]) -> Any:
        named = {word.split(":")[0] for word in f"{single} {pair}".split() if not word.startswith("$")}
        return processors.TemplateProcessing(
            single=single, pair=pair, special_tokens=[(token, ids[token]) for token in sorted(named)]
        )

    return build


TEMPLATES: dict[TemplateName, Template] = {
    "none": Template(()),
    "gpt": Template(("<|endoftext|>", "<|pad|>")),
    "chatml": Template(("<|endoftext|>", "<|pad|>", "<|im_start|>", "<|im_end|>")),
    "bert": Template(
        ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"),
        _placing("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1"),
        unk="[UNK]",
    ),
    "roberta": Template(
        ("<s>", "<pad>", "</s>", "<unk>", "<mask>"),
        lambda ids: processors.RobertaProcessing(("</s>", ids["</s>"]), ("<s>", ids["<s>"]), add_prefix_space=False),
    ),
    "t5": Template(("<pad>", "</s>", "<unk>"), _placing("$A </s>", "$A </s> $B </s>"), sentinels=100),
    "seq2seq": Template(
        ("[PAD]", "[UNK]", "[START]", "[END]", "[CLS]", "[SEP]", "[MASK]"),
        _placing("[START] $A [END]", "[START] $A [END] $B:1 [END]:1"),
        unk="[UNK]",
    ),
}

ROLE_TOKENS: dict[str, tuple[str, ...]] = {
    "pad": ("[PAD]", "<pad>", "<|pad|>"),
    "bos": ("[START]", "<s>", "<|endoftext|>", "<|begin_of_text|>", "<bos>"),
    "eos": ("[END]", "</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>"),
    "unk": ("[UNK]", "<unk>"),
    "cls": ("[CLS]",),
    "sep": ("[SEP]",),
    "mask": ("[MASK]", "<mask>"),
}
"""The names of a role's token in vocabularies of any origin; the first match counts."""


def special_tokens(options: TokenizerOptions) -> list[str]:
    """The special tokens at the start of the vocabulary; the unknown token for every model but byte-bpe."""
    template = TEMPLATES[options.template]
    missing_unk = options.model != "byte-bpe" and template.unk not in template.tokens
    return [*template.tokens, *([template.unk] if missing_unk else [])]


def sentinel_tokens(options: TokenizerOptions) -> list[str]:
    """The sentinels at the end of the vocabulary, in the order of their ids."""
    count = TEMPLATES[options.template].sentinels if options.sentinels is None else options.sentinels
    return [f"<extra_id_{number}>" for number in reversed(range(count))]


def last_tokens(options: TokenizerOptions) -> list[str]:
    """Added tokens, then sentinels, which are last as in T5; an added token that is an entry anyway keeps its id."""
    return [*options.added_tokens, *sentinel_tokens(options)]


def opening_ids(post_processor: Mapping[str, Any] | None) -> tuple[int, ...]:
    """The ids that a template puts before a text but not after it: the `<s>` of Llama, the `</s>` of OPT.

    Such a tokenizer belongs to a decoder without an encoder, which was trained on documents that begin with these ids.
    A template with ids after the text too (BERT's, T5's, all of tformer's) is for an encoder and gives ().
    """
    steps = (post_processor or {}).get("processors") or [post_processor or {}]
    template = next((step for step in steps if step.get("type") == "TemplateProcessing"), None)
    if template is None or not template["single"] or "Sequence" not in template["single"][-1]:
        return ()
    named = (piece["SpecialToken"]["id"] for piece in template["single"] if "SpecialToken" in piece)
    return tuple(token for name in named for token in template["special_tokens"][name]["ids"])


def find_special_ids(ids: Mapping[str, int], post_processor: Mapping[str, Any] | None) -> SpecialIds:
    """The roles by the names of the special tokens (`ids`) and, for RoBERTa's kind, by the template."""
    roles: dict[str, int | None] = {
        role: next((ids[token] for token in tokens if token in ids), None) for role, tokens in ROLE_TOKENS.items()
    }
    if post_processor and post_processor.get("type") in ("RobertaProcessing", "BertProcessing"):
        for role in ("cls", "sep"):
            if roles[role] is None:
                roles[role] = post_processor[role][1]
    sentinels: list[int] = []
    while (token := f"<extra_id_{len(sentinels)}>") in ids:
        sentinels.append(ids[token])
    return SpecialIds(**roles, sentinels=tuple(sentinels))
