"""Folders whose vocabulary is a SentencePiece model, read and written: one row of a table for each tokenizer class.

    ids of a row     `first`, the model's pieces from number `skip` on, `last`; or those of vocab.json
    T5, Llama        the model's own ids; T5 has its sentinels after them, DeBERTa [MASK]
    fairseq's        <s> <pad> </s> <unk>, the pieces from the fourth on, codes of languages, <mask>
    Pegasus          two masks and <unk_2> ... <unk_102> after <pad> </s>
    Marian, M2M100   vocab.json has the ids; Marian cuts each side with its own model

A template names roles, and {lang} for the code of the source's language.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sentencepiece import SentencePieceProcessor
from tokenizers import AddedToken, decoders, models, processors
from tokenizers import Tokenizer as RustTokenizer

from tformer.interop.tokenizer_config import TOKENIZER_CONFIG, TokenizerConfig
from tformer.support.errors import InputError
from tformer.support.files import read_bounded, read_object
from tformer.tokenizer import Tokenizer

FILES = ("spiece.model", "sentencepiece.bpe.model", "tokenizer.model", "spm.model")
MARIAN_FILES = ("source.spm", "target.spm")
VOCAB_JSON, TARGET_VOCAB = "vocab.json", "target_vocab.json"
MAX_BYTES, MAX_SENTINELS, MAX_ID = 256 << 20, 100_000, 2**31 - 1
FRAMED, OF_BERT = (("{cls} $A {sep}", f"{{cls}} $A {{sep}} {more}$B {{sep}}") for more in ("{sep} ", ""))
ENDED = "$A {eos}", "$A $B {eos}"
PREFIXED, SUFFIXED = ("{lang} $A {eos}", "{lang} $A $B {eos}"), ("$A {eos} {lang}", "$A $B {eos} {lang}")

FAIRSEQ = ("<s>", "<pad>", "</s>", "<unk>")
ROLES = {
    **{"bos": "<s>", "eos": "</s>", "sep": "</s>", "cls": "<s>"},
    **{"unk": "<unk>", "pad": "<pad>", "mask": "<mask>"},
}
MBART = (
    "ar_AR cs_CZ de_DE en_XX es_XX et_EE fi_FI fr_XX gu_IN hi_IN it_IT ja_XX kk_KZ ko_KR lt_LT lv_LV my_MM ne_NP nl_XX "
    "ro_RO ru_RU si_LK tr_TR vi_VN zh_CN"
)
MBART50 = (
    f"{MBART} af_ZA az_AZ bn_IN fa_IR he_IL hr_HR id_ID ka_GE km_KH mk_MK ml_IN mn_MN mr_IN pl_PL ps_AF pt_XX sv_SE "
    "sw_KE ta_IN te_IN th_TH tl_XX uk_UA ur_PK xh_ZA gl_ES sl_SI"
)
M2M100 = (
    "af am ar ast az ba be bg bn br bs ca ceb cs cy da de el en es et fa ff fi fr fy ga gd gl gu ha he hi hr ht hu hy "
    "id ig ilo is it ja jv ka kk km kn ko lb lg ln lo lt lv mg mk ml mn mr ms my ne nl no ns oc or pa pl ps pt ro ru "
    "sd si sk sl so sq sr ss su sv sw ta th tl tn tr uk ur uz vi wo xh yi yo zh zu"
)
WMT21 = "en ha is ja cs ru zh de"
NLLB = (
    "ace_Arab ace_Latn acm_Arab acq_Arab aeb_Arab afr_Latn ajp_Arab aka_Latn amh_Ethi apc_Arab arb_Arab ars_Arab "
    "ary_Arab arz_Arab asm_Beng ast_Latn awa_Deva ayr_Latn azb_Arab azj_Latn bak_Cyrl bam_Latn ban_Latn bel_Cyrl "
    "bem_Latn ben_Beng bho_Deva bjn_Arab bjn_Latn bod_Tibt bos_Latn bug_Latn bul_Cyrl cat_Latn ceb_Latn ces_Latn "
    "cjk_Latn ckb_Arab crh_Latn cym_Latn dan_Latn deu_Latn dik_Latn dyu_Latn dzo_Tibt ell_Grek eng_Latn epo_Latn "
    "est_Latn eus_Latn ewe_Latn fao_Latn pes_Arab fij_Latn fin_Latn fon_Latn fra_Latn fur_Latn fuv_Latn gla_Latn "
    "gle_Latn glg_Latn grn_Latn guj_Gujr hat_Latn hau_Latn heb_Hebr hin_Deva hne_Deva hrv_Latn hun_Latn hye_Armn "
    "ibo_Latn ilo_Latn ind_Latn isl_Latn ita_Latn jav_Latn jpn_Jpan kab_Latn kac_Latn kam_Latn kan_Knda kas_Arab "
    "kas_Deva kat_Geor knc_Arab knc_Latn kaz_Cyrl kbp_Latn kea_Latn khm_Khmr kik_Latn kin_Latn kir_Cyrl kmb_Latn "
    "kon_Latn kor_Hang kmr_Latn lao_Laoo lvs_Latn lij_Latn lim_Latn lin_Latn lit_Latn lmo_Latn ltg_Latn ltz_Latn "
    "lua_Latn lug_Latn luo_Latn lus_Latn mag_Deva mai_Deva mal_Mlym mar_Deva min_Latn mkd_Cyrl plt_Latn mlt_Latn "
    "mni_Beng khk_Cyrl mos_Latn mri_Latn zsm_Latn mya_Mymr nld_Latn nno_Latn nob_Latn npi_Deva nso_Latn nus_Latn "
    "nya_Latn oci_Latn gaz_Latn ory_Orya pag_Latn pan_Guru pap_Latn pol_Latn por_Latn prs_Arab pbt_Arab quy_Latn "
    "ron_Latn run_Latn rus_Cyrl sag_Latn san_Deva sat_Beng scn_Latn shn_Mymr sin_Sinh slk_Latn slv_Latn smo_Latn "
    "sna_Latn snd_Arab som_Latn sot_Latn spa_Latn als_Latn srd_Latn srp_Cyrl ssw_Latn sun_Latn swe_Latn swh_Latn "
    "szl_Latn tam_Taml tat_Cyrl tel_Telu tgk_Cyrl tgl_Latn tha_Thai tir_Ethi taq_Latn taq_Tfng tpi_Latn tsn_Latn "
    "tso_Latn tuk_Latn tum_Latn tur_Latn twi_Latn tzm_Tfng uig_Arab ukr_Cyrl umb_Latn urd_Arab uzn_Latn vec_Latn "
    "vie_Latn war_Latn wol_Latn xho_Latn ydd_Hebr yor_Latn yue_Hant zho_Hans zho_Hant zul_Latn"
)


@dataclass(frozen=True)
class Kind:
    """A tokenizer class of `transformers`.

    files: name of the SentencePiece model; of two sides the source's, then the target's.
    roles: role -> token, by default.
    single, pair: the template; "": nothing around a text but what tokenizer_config.json asks for, by default bos.
    first, skip, last: the vocabulary beside the pieces; see the module.
    language: the source's language where tokenizer_config.json has no `src_lang`.
    code: the token of a language.
    in_json: vocab.json has the ids.
    trims: decoded text has no spaces at its ends; else only the first is left out.
    """

    files: tuple[str, ...]
    roles: Mapping[str, str]
    single: str
    pair: str
    first: Sequence[str] = ()
    skip: int = 0
    last: Sequence[str] = ()
    language: str = ""
    code: str = "{}"
    in_json: bool = False
    trims: bool = True


def _fairseq(single: str, pair: str, codes: str = "", language: str = "") -> Kind:
    return Kind(FILES[1:2], ROLES, single, pair, FAIRSEQ, 3, (*codes.split(), "<mask>"), language)


def _sentinels(count: int) -> list[str]:
    return [f"<extra_id_{number}>" for number in reversed(range(count))]


T5_ROLES = {"eos": "</s>", "unk": "<unk>", "pad": "<pad>"}
BERT_ROLES = {"cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
MASKS = ("<pad>", "</s>", "<mask_1>", "<mask_2>", *(f"<unk_{number}>" for number in range(2, 103)))
UNUSED = ("<s>NOTUSED", "<pad>", "</s>NOTUSED", "<unk>", "<unk>NOTUSED")
KINDS: Mapping[str, Kind] = {
    "T5Tokenizer": Kind(FILES[:1], T5_ROLES, "$A {eos}", "$A {eos} $B {eos}", last=_sentinels(100)),
    "PegasusTokenizer": Kind(FILES[:1], {**T5_ROLES, "mask": "<mask_2>"}, *ENDED, MASKS, 2),
    "XLMRobertaTokenizer": _fairseq(*FRAMED),
    "CamembertTokenizer": Kind(FILES[1:2], ROLES, *FRAMED, UNUSED, 1, ("<mask>",)),
    "MBartTokenizer": _fairseq(*SUFFIXED, MBART, "en_XX"),
    "MBart50Tokenizer": _fairseq(*PREFIXED, MBART50, "en_XX"),
    "NllbTokenizer": _fairseq(*PREFIXED, NLLB, "eng_Latn"),
    "LlamaTokenizer": Kind(FILES[2:3], {"bos": "<s>", "eos": "</s>", "unk": "<unk>"}, "", "", trims=False),
    "BigBirdTokenizer": Kind(FILES[:1], ROLES | BERT_ROLES, *OF_BERT),
    "DebertaV2Tokenizer": Kind(
        FILES[3:],
        BERT_ROLES | {"bos": "[CLS]", "eos": "[SEP]", "unk": "[UNK]", "pad": "[PAD]"},
        *OF_BERT,
        last=("[MASK]",),
    ),
    "M2M100Tokenizer": Kind(
        FILES[1:2],
        {role: token for role, token in ROLES.items() if role not in ("cls", "mask")},
        *PREFIXED,
        last=[f"__{code}__" for code in M2M100.split()],
        language="en",
        code="__{}__",
        in_json=True,
    ),
    "MarianTokenizer": Kind(MARIAN_FILES, T5_ROLES, *ENDED, in_json=True),
}
"""By class name, without "Fast"."""


def read_pieces(config: TokenizerConfig, name: str, unk: str, *, target: bool) -> tuple[RustTokenizer, dict[str, Any]]:
    """(tokenizer, section `sentencepiece` of its file) of a folder: pieces with their ids, the tokens that are special
    in every tokenizer of the class, and the decoder; roles and template are left to the caller.

    Args:
        name: of the class.
        unk: the unknown token.
        target: the side's model and vocabulary that are read.

    Raises InputError for a damaged model or vocabulary.
    """
    folder, kind = config.folder, KINDS[name]
    path = folder / kind.files[-1 if target else 0]
    if not path.exists():  # another usual name
        path = next((folder / name for name in FILES if (folder / name).exists()), path)
    content = read_bounded(path, max_bytes=MAX_BYTES)
    try:
        model = SentencePieceProcessor(model_proto=content)
    except Exception as error:  # RuntimeError in most versions
        raise InputError(f"{path} is no SentencePiece model: {error}") from error
    last = kind.last
    if config.options.get("language_codes") == "wmt21":
        last = [kind.code.format(code) for code in WMT21.split()]
    if name == "T5Tokenizer" and (sentinels := config.options.get("extra_ids")) is not None:
        if not isinstance(sentinels, int) or not 0 <= sentinels <= MAX_SENTINELS:
            expected = f"expected a number up to {MAX_SENTINELS:,}"
            raise InputError(f"{folder / TOKENIZER_CONFIG}: extra_ids: found {sentinels!r}, {expected}")
        last = _sentinels(sentinels)
    if kind.in_json:
        own = target and (folder / TARGET_VOCAB).exists()
        vocabulary = read_ids(folder / (TARGET_VOCAB if own else VOCAB_JSON))
    else:
        pieces = [model.id_to_piece(number) for number in range(kind.skip, model.get_piece_size())]
        vocabulary = {token: number for number, token in enumerate(dict.fromkeys([*kind.first, *pieces, *last]))}
    if unk not in vocabulary:
        raise InputError(f"{path}: the unknown token {unk} is missing in the vocabulary")
    tokenizer = RustTokenizer(models.WordLevel(vocabulary, unk_token=unk))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    special = [AddedToken(token, special=True, lstrip=token == "<mask>") for token in (*kind.first, *last)]
    tokenizer.add_special_tokens(special)
    section = {
        "model": base64.b64encode(content).decode("ascii"),
        "codes": name == "MarianTokenizer",
        "trims": kind.trims,
        "config": {**config.options, "tokenizer_class": name},
    }
    return tokenizer, section


def read_ids(path: Path) -> dict[str, int]:
    """The ids of a vocab.json."""
    vocabulary = read_object(path, max_bytes=MAX_BYTES)
    for token, number in vocabulary.items():
        if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number <= MAX_ID:
            raise InputError(f"{path}: {token}: found {number!r}, expected an id")
    return vocabulary


def placed(kind: Kind, config: TokenizerConfig, names: Mapping[str, str], ids: Mapping[str, int]) -> Any:
    """The post-processor of a class. InputError for a language without a token."""
    single, pair = SUFFIXED if config.flag("legacy_behaviour", default=False) else (kind.single, kind.pair)
    language = kind.code.format(config.options.get("src_lang") or kind.language)
    if "{lang}" in single and language not in ids:
        raise InputError(f"{config.folder / TOKENIZER_CONFIG}: src_lang: {language} is no token of the vocabulary")
    if missing := [role for role in ("eos", "cls", "sep") if f"{{{role}}}" in single and role not in names]:
        raise InputError(f"{config.folder}: the vocabulary has no {missing[0]} token, which stands beside every text")
    parts = [[part.format(lang=language, **names) for part in template.split()] for template in (single, pair)]
    special = [(token, ids[token]) for token in dict.fromkeys(parts[1]) if not token.startswith("$")]
    return processors.TemplateProcessing(single=parts[0], pair=parts[1], special_tokens=special)


def piece_files(source: Tokenizer, target: Tokenizer | None) -> dict[str, str | bytes]:
    """{file name: content} of the folder that one or two tokenizers of SentencePiece came from; {} for others.

    target: of the side that is written, where it has its own.
    """
    if source.sentencepiece is None or (target is not None and target.sentencepiece is None):
        return {}
    config = dict(source.sentencepiece["config"])
    kind = KINDS[config["tokenizer_class"]]
    sides = (source, target or source)
    models = [base64.b64decode((side.sentencepiece or {})["model"]) for side in sides]
    found: dict[str, str | bytes] = dict(zip(kind.files, models, strict=False))
    if kind.in_json:
        ids = [json.loads(side.to_json())["model"]["vocab"] for side in sides]
        own = ids[0] != ids[1]
        config |= {"separate_vocabs": own} if len(kind.files) > 1 else {}
        found |= {name: to_json(one) for name, one in zip((VOCAB_JSON, TARGET_VOCAB)[: 1 + own], ids, strict=False)}
    return found | {TOKENIZER_CONFIG: to_json(config)}


def to_json(document: Mapping[str, Any]) -> str:
    return json.dumps(document, ensure_ascii=False, indent=2) + "\n"
