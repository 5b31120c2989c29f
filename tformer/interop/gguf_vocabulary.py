"""The vocabulary of a GGUF file: tokens, their types, merges or scores, and how llama.cpp cuts text.

    gpt2    BPE over bytes. llama.cpp cuts a text by one of the patterns that it has a name for
    llama   BPE over characters, a space written as ▁, unseen characters as bytes: the pair whose token has the highest
            score is joined first. Nothing cuts a text

llama.cpp normalizes no text, and finds an added token inside words too. So a tokenizer is written only if llama.cpp
gives the same ids; what is not known by its name is shown by 10,000 texts.
"""

from __future__ import annotations

import heapq
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, decoders, models, normalizers, processors
from tokenizers import Tokenizer as RustTokenizer

from tformer.support.errors import InputError
from tformer.tokenizer import Tokenizer
from tformer.tokenizer.pipeline import BYTE_TOKENS, SPACE
from tformer.tokenizer.special import SpecialIds

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
ROLES = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}  # `tokenizer.ggml.*_token_id` -> role
NUM_TEXTS = 10_000
MAX_CHARACTERS = 1000  # of a token in a vocabulary without merges
_UPPER, _SMALL = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_ENDING}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}@| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_REST}"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_CASED = rf"{_LEAD}{_UPPER}*{_SMALL}+@|{_LEAD}{_UPPER}+{_SMALL}*@|\p{{N}}# ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_REST}"
_CASED_IN_ASCII = _CASED.replace(_UPPER, r"[\p{L}&&[^a-z]]").replace(_SMALL, r"[\p{L}&&[^A-Z]]")


def _pattern(regex: str) -> list[dict[str, Any]]:
    split = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    return [split, {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}]


GPT2 = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
CUTS: Mapping[str, tuple[list[dict[str, Any]], bool]] = {
    "gpt-2": ([GPT2], False),
    "smollm": ([{"type": "Digits", "individual_digits": True}, GPT2], False),
    "qwen2": (_pattern(_LLAMA3.replace("@", "")), False),
    "llama-bpe": (_pattern(_LLAMA3.replace("@", "{1,3}")), True),
    "tekken": (_pattern(_CASED.replace("@", "").replace("#", "|")), True),
    "gpt-4o": (_pattern(_CASED.replace("@", f"{_ENDING}?").replace("#", "{1,3}|")), False),
}
"""`tokenizer.ggml.pre` -> the steps of the tokenizer.json that the name stands for, and whether a word that is an entry
is that token without any merge."""
COMPUTED: Mapping[str, tuple[list[dict[str, Any]], bool]] = {
    **CUTS,
    "tekken": (_pattern(_CASED_IN_ASCII.replace("@", "").replace("#", "|")), True),
    "gpt-4o": (_pattern(_CASED_IN_ASCII.replace("@", f"{_ENDING}?").replace("#", "{1,3}|")), False),
}
"""The same as llama.cpp computes it: in two of them only a-z and A-Z have a case, and combining marks are apart."""


@dataclass(frozen=True)
class Vocabulary:
    """The part of a GGUF file about the tokenizer: values of the keys `tokenizer.ggml.*`."""

    values: Mapping[str, Any]
    notes: tuple[str, ...] = ()


def vocabulary_of(tokenizer: Tokenizer, special: SpecialIds, *, rows: int) -> Vocabulary:
    """The vocabulary as llama.cpp reads it.

    Args:
        special: the ids of the special tokens.
        rows: of the embedding, each of which has a token there.

    Raises InputError where llama.cpp would give other ids; it names what differs.
    """
    document = json.loads(tokenizer.to_json())
    added = {token["content"]: token["special"] for token in document.get("added_tokens") or ()}
    tokens = [token or f"[PAD{number}]" for number, token in enumerate(tokenizer.tokens)]
    tokens += [f"[PAD{number}]" for number in range(len(tokens), rows)]
    known = {token: CONTROL if is_special else USER_DEFINED for token, is_special in added.items()}
    known |= dict.fromkeys(BYTE_TOKENS, BYTE) | {token: UNUSED for token in tokens if tokenizer.token_id(token) is None}
    kinds = [known.get(token, NORMAL) for token in tokens]
    opening = tokenizer.opening
    if opening and opening != (special.bos,):
        raise InputError(f"--to gguf: texts begin with the ids {opening}, llama.cpp puts one bos token there at most")
    roles = {name: getattr(special, role) for name, role in ROLES.items()}
    found: dict[str, Any] = {f"{name}_token_id": token for name, token in roles.items() if token is not None}
    found |= {"tokens": tokens, "token_type": kinds, "add_bos_token": bool(opening), "add_eos_token": False}
    model, notes = document["model"], []
    if tokenizer.kind == "byte-bpe":
        name = _cut_of(tokenizer, document)
        if document.get("normalizer") is not None:
            notes.append("llama.cpp does not apply the tokenizer's Unicode normal form NFC")
        if COMPUTED[name] != CUTS[name]:
            notes.append(f"with {name} llama.cpp cuts words with combining marks or capitals other than A-Z otherwise")
        merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in model["merges"]]
        return Vocabulary({"model": "gpt2", "pre": name, **found, "merges": merges}, tuple(notes))
    if tokenizer.sentencepiece is not None or tokenizer.kind != "bpe" or not model.get("byte_fallback"):
        raise InputError(
            f"--to gguf: the tokenizer is of the kind {tokenizer.kind}"
            f"{' of SentencePiece' if tokenizer.sentencepiece else ''}; llama.cpp has byte-bpe, and bpe with bytes for "
            "unseen characters that cuts no text",
            hint="tformer train-tokenizer --model byte-bpe --pre-tokenization gpt-2",
        )
    if absent := [token for token in BYTE_TOKENS if tokenizer.token_id(token) is None]:
        raise InputError(f"--to gguf: the vocabulary lacks {absent[0]}, llama.cpp needs a token for each byte")
    scores = dict.fromkeys(tokens, 0.0)
    for rank, pair in reversed(list(enumerate(model["merges"]))):
        scores["".join(pair if isinstance(pair, list) else pair.split(" "))] = -float(rank + 1)
    unknown = [] if special.unk is None else [special.unk]
    found["token_type"] = [UNKNOWN if number in unknown else kind for number, kind in enumerate(kinds)]
    prefix = tokenizer.tokens[tokenizer.encode("!")[0]] not in ("!", BYTE_TOKENS[ord("!")])
    ids = {token: number for number, token in enumerate(tokens) if kinds[number] in (NORMAL, BYTE)}
    texts = [text.lstrip(" ") for text in texts_of(tokenizer)]
    theirs = [joined(text, ids, scores, prefix=prefix) for text in texts]
    _require_equal(texts, tokenizer.encode_batch(texts), theirs, "llama")
    values = {"model": "llama", "pre": "default", **found, "scores": [scores[token] for token in tokens]}
    return Vocabulary({**values, "add_space_prefix": prefix})


def _cut_of(tokenizer: Tokenizer, document: Mapping[str, Any]) -> str:
    """The name of the pre-tokenization with which llama.cpp gives the tokenizer's ids."""
    steps = document.get("pre_tokenizer") or {}
    steps = [
        {"use_regex": True, **step} if step["type"] == "ByteLevel" else step
        for step in (steps["pretokenizers"] if steps.get("type") == "Sequence" else [steps])
        if step
    ]
    bare = [{key: value for key, value in step.items() if key != "trim_offsets"} for step in steps]
    whole = bool(document["model"].get("ignore_merges"))
    plain = not any(not token["special"] for token in document.get("added_tokens") or ())
    if plain and (document.get("normalizer") or {"type": "NFC"}) == {"type": "NFC"}:
        for name, known in CUTS.items():
            if (bare, whole) in (known, COMPUTED[name]):
                return name
    texts = texts_of(tokenizer)
    ours = tokenizer.encode_batch(texts)
    differing: dict[str, int] = {}
    for name, (cuts, ignore_merges) in COMPUTED.items():
        theirs = _with_cuts(document, cuts, ignore_merges).encode_batch(texts)
        differing[name] = sum(one != other for one, other in zip(ours, theirs, strict=True))
        if not differing[name]:
            return name
    best = min(differing, key=lambda name: differing[name])
    _require_equal(texts, ours, _with_cuts(document, *COMPUTED[best]).encode_batch(texts), best)
    raise AssertionError(best)


def _with_cuts(document: Mapping[str, Any], cuts: list[dict[str, Any]], ignore_merges: bool) -> Tokenizer:
    """The tokenizer as llama.cpp computes it."""
    steps = [{"trim_offsets": True, **cut} if cut["type"] == "ByteLevel" else cut for cut in cuts]
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    changed = {
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "added_tokens": [token | plain for token in document.get("added_tokens") or ()],
        "model": document["model"] | {"ignore_merges": ignore_merges},
    }
    return Tokenizer.from_json(json.dumps({**document, **changed}))


def _require_equal(texts: Sequence[str], ours: list[list[int]], theirs: list[list[int]], name: str) -> None:
    """Raise InputError, with a text as an example, where two tokenizers give different ids."""
    unlike = [number for number in range(len(texts)) if ours[number] != theirs[number]]
    if unlike:
        first = min(unlike, key=lambda number: len(texts[number]))
        raise InputError(
            f"--to gguf: llama.cpp has no pre-tokenization that gives the tokenizer's ids: with the nearest, {name}, "
            f"{len(unlike):,} of {len(texts):,} texts differ, such as {texts[first]!r}: found {theirs[first][:12]}, "
            f"expected {ours[first][:12]}",
            hint="train-tokenizer --pre-tokenization gpt-2 makes one that is written; --to huggingface keeps this one",
        )


ODD = "'s 'S 'll 'LL don't I'M e\u0301 \u0301 ß Ωσ жЖ 中文 한글 हिन्दी ١٢ Ⅷ 1234567 €! -- ... 😀 👩\u200d💻"
SPACES = (" ", "  ", "    ", "\n", "\n\n", "\r\n", "\t", " \n ", "\u00a0", "\u3000")


def texts_of(tokenizer: Tokenizer, number: int = NUM_TEXTS) -> list[str]:
    """Texts made of the tokenizer's entries, alone and side by side, and of strings that patterns cut differently."""
    rng = random.Random(0)
    entries = [tokenizer.decode([token], skip_special=False) for token in range(tokenizer.vocab_size)]
    entries = [entry for entry in entries if entry and "\ufffd" not in entry] or ["a"]

    def part() -> str:
        kind = rng.random()
        if kind < 0.6:
            return rng.choice(entries) + rng.choice(("", "", " "))
        if kind < 0.8:
            return rng.choice(ODD.split()) + rng.choice(("", " "))
        return (
            rng.choice(SPACES) if kind < 0.9 else chr(rng.choice((rng.randrange(32, 127), rng.randrange(160, 0x600))))
        )

    return ["".join(part() for _ in range(rng.randint(1, 12))) for _ in range(number)]


def joined(text: str, ids: Mapping[str, int], scores: Mapping[str, float], *, prefix: bool) -> list[int]:
    """The ids of llama.cpp's kind `llama`: the pair with the highest score, then the leftmost, is joined first."""
    pieces = list((" " * prefix + text).replace(" ", SPACE))
    if not text:
        return []
    after, before = [*range(1, len(pieces)), -1], [*range(-1, len(pieces) - 1)]
    heap: list[tuple[float, int, str]] = []

    def offer(left: int) -> None:
        if left >= 0 and after[left] >= 0 and (pair := pieces[left] + pieces[after[left]]) in ids:
            heapq.heappush(heap, (-scores[pair], left, pair))

    for left in range(len(pieces)):
        offer(left)
    while heap:
        _, left, pair = heapq.heappop(heap)
        right = after[left]
        if not pieces[left] or right < 0 or pieces[left] + pieces[right] != pair:
            continue
        pieces[left], pieces[right], after[left] = pair, "", after[right]
        if after[left] >= 0:
            before[after[left]] = left
        offer(before[left])
        offer(left)
    return [
        number
        for piece in pieces
        if piece
        for number in ([ids[piece]] if piece in ids else [ids[BYTE_TOKENS[byte]] for byte in piece.encode()])
    ]


ALIASES = {"llama3": "llama-bpe", "llama-v3": "llama-bpe", "phi-2": "gpt-2", "deepseek-r1-qwen": "qwen2"}
"""Further names of llama.cpp for the same pre-tokenization."""

OF_LISTS = {"tokens": str, "merges": str, "token_type": int, "scores": float}
"""Keys of `tokenizer.ggml` -> the type of their values."""


def document_of(name: object, values: Mapping[str, Any]) -> dict[str, Any]:
    """The tokenizer.json of the values of `tokenizer.ggml.*`.

    Raises InputError, with the file's name, for a missing or damaged vocabulary, and for others' kinds.
    """
    model, pre, tokens = values.get("model"), values.get("pre"), values.get("tokens")
    pre = ALIASES.get(str(pre), pre)
    other = "name a vocabulary with --tokenizer FILE"
    if not tokens:
        raise InputError(f"{name} has no vocabulary (tokenizer.ggml.tokens)", hint=other)
    for key, type_ in OF_LISTS.items():
        if not isinstance(stated := values.get(key, []), list) or not all(isinstance(one, type_) for one in stated):
            raise InputError(f"{name}: tokenizer.ggml.{key}: expected a list of values of the type {type_.__name__}")
    if model not in ("gpt2", "llama") or (model == "gpt2" and str(pre) not in CUTS):
        raise InputError(
            f"{name}: tokenizer.ggml: found the model {model!r} with the pre-tokenization {pre!r}, tformer reads "
            f"llama, and gpt2 with {', '.join(CUTS)}",
            hint=other,
        )
    ids = {token: number for number, token in enumerate(tokens)}
    if len(ids) < len(tokens):
        twice = next(token for number, token in enumerate(tokens) if ids[token] != number)
        raise InputError(f"{name}: tokenizer.ggml.tokens: found {twice!r} twice")
    token_types = values.get("token_type") or [NORMAL] * len(tokens)
    scores = values.get("scores") or ([] if model == "llama" else [0.0] * len(tokens))
    for key, numbers in (("token_type", token_types), ("scores", scores)):
        if len(numbers) != len(tokens):
            raise InputError(f"{name}: tokenizer.ggml.{key}: found {len(numbers):,} values for {len(tokens):,} tokens")
    for role in ROLES:
        key, special_id = f"tokenizer.ggml.{role}_token_id", values.get(f"{role}_token_id", 0)
        if not isinstance(special_id, int) or not 0 <= special_id < len(tokens):
            raise InputError(f"{name}: {key}: found {special_id!r}, expected an id below {len(tokens):,}")
    while token_types[len(ids) - 1] == UNUSED and len(ids) > 1:  # rows of the embedding beyond the vocabulary
        del ids[tokens[len(ids) - 1]]
    if model == "gpt2":
        cuts, whole = CUTS[str(pre)]
        steps = [{"trim_offsets": False, **cut} if cut["type"] == "ByteLevel" else cut for cut in cuts]
        merges = [tuple(merge.split(" ", 1)) for merge in values.get("merges") or ()]
        options: dict[str, Any] = {"ignore_merges": whole}
    else:
        steps, unk = [], values.get("unknown_token_id")
        of_token = dict(zip(tokens, scores, strict=True))
        text = {token for token, token_type in zip(tokens, token_types, strict=True) if token_type == NORMAL}
        if (longest := max(map(len, text), default=0)) > MAX_CHARACTERS:  # each is cut at every place
            problem = f"found a token of {longest:,} characters, expected at most {MAX_CHARACTERS:,}"
            raise InputError(f"{name}: tokenizer.ggml.tokens: {problem}")
        pairs = ((token[:cut], token[cut:]) for token in text for cut in range(1, len(token)))
        joins = [pair for pair in pairs if pair[0] in text and pair[1] in text]
        merges = sorted(joins, key=lambda pair: (-of_token["".join(pair)], ids[pair[0]], ids[pair[1]]))
        options = {"byte_fallback": True, "fuse_unk": True, "unk_token": None if unk is None else tokens[unk]}
    if strange := [merge for merge in merges if len(merge) != 2 or not {*merge, "".join(merge)} <= ids.keys()]:
        raise InputError(
            f"{name}: tokenizer.ggml.merges: found {' '.join(strange[0])!r}, which joins no two tokens to one"
        )
    rust = RustTokenizer(models.BPE(ids, merges, **options))
    rust.decoder = decoders.ByteLevel()
    if model == "llama":
        prefix = bool(values.get("add_space_prefix", True))
        before = [normalizers.Prepend(SPACE)] if prefix else []
        rust.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", SPACE)])
        back = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        rust.decoder = decoders.Sequence([*back, *([decoders.Strip(" ", 1, 0)] if prefix else [])])
    added = [pair for pair in zip(tokens, token_types, strict=True) if pair[1] in (CONTROL, USER_DEFINED, UNKNOWN)]
    rust.add_tokens(
        [AddedToken(token, special=token_type != USER_DEFINED, normalized=False) for token, token_type in added]
    )
    if values.get("add_bos_token", model == "llama" or CUTS[str(pre)][1]) and "bos_token_id" in values:
        bos = tokens[values["bos_token_id"]]
        special = [(bos, ids[bos])]
        rust.post_processor = processors.TemplateProcessing([bos, "$A"], [bos, "$A", "$B:1"], special)
    document: dict[str, Any] = json.loads(rust.to_str())
    return document | ({"pre_tokenizer": {"type": "Sequence", "pretokenizers": steps}} if steps else {})
