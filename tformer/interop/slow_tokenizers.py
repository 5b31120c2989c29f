"""Conversion of older vocabulary files (before tokenizer.json) with the `tokenizers` library: same ids, same text.

    vocab.txt                 WordPiece: BERT, DistilBERT, ELECTRA; MPNet with <s> a </s>
    vocab.json + merges.txt   BPE over bytes: GPT-2 and OPT; RoBERTa, BART and Longformer with <s> a </s>
    spiece.model and similar  SentencePiece: the classes of `sentencepiece_files`

What `transformers` takes as given where the files are silent is written here in tables. Tokens that the small files
name are added in its order: by id, then those that have a role.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from tformer.interop.architectures import ARCHITECTURES
from tformer.interop.sentencepiece_files import (
    FILES,
    KINDS,
    MARIAN_FILES,
    MAX_BYTES,
    ROLES,
    VOCAB_JSON,
    placed,
    read_ids,
    read_pieces,
)
from tformer.interop.tokenizer_config import TOKENIZER_CONFIG, TokenizerConfig
from tformer.support.errors import InputError
from tformer.support.files import read_bounded
from tformer.tokenizer.sentences import SENTENCEPIECE

VOCAB_TXT, MERGES = "vocab.txt", "merges.txt"

BERT = {"unk": "[UNK]", "sep": "[SEP]", "pad": "[PAD]", "cls": "[CLS]", "mask": "[MASK]"}
GPT2 = {"unk": "<|endoftext|>", "bos": "<|endoftext|>", "eos": "<|endoftext|>"}
ROBERTA = ROLES
MPNET = ROBERTA | {"unk": "[UNK]"}
# Names of tokenizer classes (without "Fast") -> their default special tokens by role.
WORDPIECE_CLASSES = {
    **{f"{name}Tokenizer": BERT for name in ("Bert", "DistilBert", "Electra")},
    "MPNetTokenizer": MPNET,
}
BYTE_BPE_CLASSES = {
    **dict.fromkeys(("GPT2Tokenizer", "CodeGenTokenizer"), GPT2),
    **{f"{name}Tokenizer": ROBERTA for name in ("Roberta", "Bart", "Longformer", "LED")},
}
JSON_HINT = (
    "in an environment with transformers: "
    "AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR) writes a tokenizer.json; import takes --tokenizer FILE"
)


Template = Callable[[TokenizerConfig, Mapping[str, str], Mapping[str, int]], Any]
"""(config, token of each role, ids) -> the post-processor that places special tokens."""

Converted = tuple[str, Mapping[str, str]]
"""(text of a tokenizer.json, role -> token)"""


def convert_slow(config: TokenizerConfig, model_config: Mapping[str, Any], *, target: bool = False) -> Converted | None:
    """The tokenizer of a folder without tokenizer.json; None when it has no vocabulary in these formats.

    target: the tokenizer of the target side; None where both sides share one.

    Raises InputError for damaged files, and for a class whose rules are others.
    """
    folder = config.folder
    if not target and (folder / VOCAB_TXT).exists():
        name = _class_name(config, model_config, WORDPIECE_CLASSES, "BertTokenizer", VOCAB_TXT)
        defaults = WORDPIECE_CLASSES[name]
        roles = _roles(config, defaults)
        template = _frame_of_roberta if defaults is MPNET else _frame_of_bert
        return _finished(_wordpiece(config, roles), config, roles, template)
    if not target and (folder / VOCAB_JSON).exists() and (folder / MERGES).exists():
        name = _class_name(config, model_config, BYTE_BPE_CLASSES, "GPT2Tokenizer", VOCAB_JSON)
        defaults = BYTE_BPE_CLASSES[name]
        roles = _roles(config, defaults)
        framed = defaults is ROBERTA
        template = _frame_of_roberta if framed else _ends_of_gpt2
        return _finished(_byte_bpe(config, roles, framed=framed), config, roles, template)
    if not any((folder / file).exists() for file in (*FILES, *MARIAN_FILES)):
        return None
    name = _class_name(config, model_config, KINDS, "T5Tokenizer", "a SentencePiece model")
    kind = KINDS[name]
    if target and len(kind.files) == 1:
        return None
    roles = _roles(config, kind.roles)
    unk = roles["unk"].content if "unk" in roles else kind.roles["unk"]
    tokenizer, section = read_pieces(config, name, unk, target=target)
    placing = partial(placed, kind) if kind.single else partial(_ends_of_gpt2, bos=True)
    text, names = _finished(tokenizer, config, roles, placing)
    section["config"] |= {f"{role}_token": token for role, token in names.items()}
    return json.dumps(json.loads(text) | {SENTENCEPIECE: section}, ensure_ascii=False), names


def _class_name(
    config: TokenizerConfig, model_config: Mapping[str, Any], classes: Collection[str], usual: str, file: str
) -> str:
    """The tokenizer class of a folder. InputError for one that reads such a file by other rules."""
    architecture = ARCHITECTURES.get(str(model_config.get("model_type")))
    by_type = (architecture.slow_tokenizer if architecture else None) or usual
    found = config.options.get("tokenizer_class") or model_config.get("tokenizer_class") or by_type
    name = str(found).removesuffix("Fast")
    name = by_type if name in ("PreTrainedTokenizer", "TokenizersBackend") else name
    if name not in classes:
        raise InputError(
            f"{config.folder}: tokenizer_class: found {found}, tformer reads {file} as {', '.join(classes)} do",
            hint=JSON_HINT,
        )
    return name


def _roles(config: TokenizerConfig, defaults: Mapping[str, str]) -> dict[str, AddedToken]:
    named = {role: AddedToken(name, special=True) for role, name in defaults.items()} | dict(config.roles)
    return {role: token for role, token in named.items() if token is not None}


def _wordpiece(config: TokenizerConfig, roles: Mapping[str, AddedToken]) -> Tokenizer:
    path = config.folder / VOCAB_TXT
    lines = _text(path).split("\n")
    vocabulary = {line.rstrip(): number for number, line in enumerate(lines[:-1] if lines[-1] == "" else lines)}
    _require(
        ("unk", "cls", "sep"), roles, vocabulary, config, path, "which every WordPiece vocabulary of BERT's kind has"
    )
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token=roles["unk"].content))
    tokenizer.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=bool(config.flag("tokenize_chinese_chars", default=True)),
        strip_accents=config.flag("strip_accents", default=None),  # null: with lower case
        lowercase=bool(config.flag("do_lower_case", default=True)),
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    return tokenizer


def _byte_bpe(config: TokenizerConfig, roles: Mapping[str, AddedToken], *, framed: bool) -> Tokenizer:
    path = config.folder / VOCAB_JSON
    vocabulary = read_ids(path)
    if framed:
        _require(("cls", "sep"), roles, vocabulary, config, path, "which stands around every text of this tokenizer")
    space = bool(config.flag("add_prefix_space", default=False))
    merges = _merges(config.folder / MERGES, vocabulary)
    try:
        model = models.BPE(vocabulary, merges, continuing_subword_prefix="", end_of_word_suffix="", fuse_unk=False)
    except Exception as error:  # the library raises plain Exception
        raise InputError(f"{config.folder}: {VOCAB_JSON} and {MERGES} do not go together: {error}") from error
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=space)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _merges(path: Path, vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    merges = []
    for number, line in enumerate(_text(path).split("\n"), 1):
        if line.startswith("#version") or not line.strip():
            continue
        first, _, second = line.rstrip("\r").partition(" ")
        odd = next((part for part in (first, second, first + second) if part not in vocabulary), None)
        if not first or not second or odd is not None:
            raise InputError(f"{path}:{number}: found {line!r}, expected two tokens of {VOCAB_JSON} and what they make")
        merges.append((first, second))
    return merges


def _finished(
    tokenizer: Tokenizer, config: TokenizerConfig, roles: Mapping[str, AddedToken], template: Template
) -> Converted:
    """The tokenizer with its added tokens and template, as text."""
    for number, token in config.added:
        tokenizer.add_tokens([token])
        found = tokenizer.token_to_id(token.content)
        if found != number:
            raise InputError(
                f"{config.folder}: the added token {token.content!r} has the id {number}, by the vocabulary {found}",
                hint=JSON_HINT,
            )
    given = {token.content for token in config.roles.values() if token is not None}
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    # A default special token that the vocabulary lacks is left out: it has no row in the embedding.
    wanted = [token for token in roles.values() if token.content in given or token.content in vocabulary]
    tokenizer.add_special_tokens([*wanted, *config.further])
    ids = tokenizer.get_vocab(with_added_tokens=True)
    names = {role: token.content for role, token in roles.items() if token.content in ids}
    tokenizer.post_processor = template(config, names, ids)
    return tokenizer.to_str(), names


def _frame_of_bert(config: TokenizerConfig, names: Mapping[str, str], ids: Mapping[str, int]) -> Any:
    cls, sep = names["cls"], names["sep"]
    return processors.TemplateProcessing(
        single=[f"{cls}:0", "$A:0", f"{sep}:0"],
        pair=[f"{cls}:0", "$A:0", f"{sep}:0", "$B:1", f"{sep}:1"],
        special_tokens=[(cls, ids[cls]), (sep, ids[sep])],
    )


def _frame_of_roberta(config: TokenizerConfig, names: Mapping[str, str], ids: Mapping[str, int]) -> Any:
    cls, sep = names["cls"], names["sep"]
    space = bool(config.flag("add_prefix_space", default=False))
    return processors.RobertaProcessing((sep, ids[sep]), (cls, ids[cls]), True, space)


def _ends_of_gpt2(
    config: TokenizerConfig, names: Mapping[str, str], ids: Mapping[str, int], *, bos: bool = False
) -> Any:
    """GPT-2's template: nothing around a text unless the config says so (OPT: </s> before it; Llama: <s>)."""
    defaults = {"bos": bos, "eos": False}
    asked = {role: bool(config.flag(f"add_{role}_token", default=usual)) for role, usual in defaults.items()}
    for role, wanted in asked.items():
        if wanted and role not in names:
            raise InputError(f"{config.folder / TOKENIZER_CONFIG}: add_{role}_token: there is no {role}_token to add")
    before, after = ([names[role]] if asked[role] else [] for role in ("bos", "eos"))
    single = [*(f"{name}:0" for name in before), "$A:0", *(f"{name}:0" for name in after)]
    second = [*(f"{name}:1" for name in before), "$B:1", *(f"{name}:1" for name in after)]
    special = [(name, ids[name]) for name in dict.fromkeys([*before, *after])]
    return processors.TemplateProcessing(single=single, pair=[*single, *second], special_tokens=special)


def _require(
    wanted: Sequence[str],
    roles: Mapping[str, AddedToken],
    vocabulary: Mapping[str, int],
    config: TokenizerConfig,
    path: Path,
    why: str,
) -> None:
    """Raise InputError for a role whose token is neither in the vocabulary nor added."""
    known = {*vocabulary, *(token.content for _, token in config.added)}
    for role in wanted:
        if role not in roles or roles[role].content not in known:
            token = roles[role].content if role in roles else f"the {role} token"
            raise InputError(f"{path}: {token} is missing, {why}")


def _text(path: Path) -> str:
    try:
        return read_bounded(path, max_bytes=MAX_BYTES).decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: byte {error.start} is not UTF-8") from error
