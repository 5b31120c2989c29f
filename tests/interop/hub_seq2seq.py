"""config.json after those of well-known encoder-decoders: their sizes, and the keys that files of every age carry.

Written from memory, not copied from the folders: sizes are held to parameter counts, the other keys to nothing.
"""

from __future__ import annotations

from typing import Any

LABELS = {
    "id2label": {"0": "LABEL_0", "1": "LABEL_1", "2": "LABEL_2"},
    "label2id": {"LABEL_0": 0, "LABEL_1": 1, "LABEL_2": 2},
}


def t5(**values: Any) -> dict[str, Any]:
    return {
        "architectures": ["T5ForConditionalGeneration"],
        "d_kv": 64,
        "d_model": 512,
        "decoder_start_token_id": 0,
        "dropout_rate": 0.1,
        "eos_token_id": 1,
        "initializer_factor": 1.0,
        "is_encoder_decoder": True,
        "layer_norm_epsilon": 1e-06,
        "model_type": "t5",
        "n_positions": 512,
        "output_past": True,
        "pad_token_id": 0,
        "relative_attention_num_buckets": 32,
        "use_cache": True,
        "vocab_size": 32128,
        **values,
    }


def bart(width: int, heads: int, layers: int, **values: Any) -> dict[str, Any]:
    both = {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in
            (("attention_heads", heads), ("ffn_dim", 4 * width), ("layerdrop", 0.0), ("layers", layers))}  # fmt: skip
    return {
        "_num_labels": 3,
        "activation_dropout": 0.1,
        "activation_function": "gelu",
        "add_bias_logits": False,
        "add_final_layer_norm": False,
        "attention_dropout": 0.1,
        "bos_token_id": 0,
        "classif_dropout": 0.0,
        "classifier_dropout": 0.0,
        "d_model": width,
        "decoder_start_token_id": 2,
        "dropout": 0.1,
        "eos_token_id": 2,
        "forced_eos_token_id": 2,
        "gradient_checkpointing": False,
        "init_std": 0.02,
        "is_encoder_decoder": True,
        "max_position_embeddings": 1024,
        "normalize_before": False,
        "num_hidden_layers": layers,
        "pad_token_id": 1,
        "scale_embedding": False,
        "use_cache": True,
        "vocab_size": 50265,
        **LABELS,
        **both,
        **values,
    }


def fairseq(width: int, heads: int, layers: int, **values: Any) -> dict[str, Any]:
    """M2M100's, NLLB's and FSMT's: shorter than BART's."""
    both = {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in
            (("attention_heads", heads), ("ffn_dim", 4 * width), ("layerdrop", 0.05), ("layers", layers))}  # fmt: skip
    return {
        "activation_dropout": 0.0,
        "activation_function": "relu",
        "attention_dropout": 0.1,
        "bos_token_id": 0,
        "d_model": width,
        "decoder_start_token_id": 2,
        "dropout": 0.1,
        "early_stopping": True,
        "eos_token_id": 2,
        "gradient_checkpointing": False,
        "init_std": 0.02,
        "is_encoder_decoder": True,
        "max_length": 200,
        "max_position_embeddings": 1024,
        "num_beams": 5,
        "num_hidden_layers": layers,
        "pad_token_id": 1,
        "scale_embedding": True,
        "use_cache": True,
        **both,
        **values,
    }


BASE, LARGE = (768, 12, 6), (1024, 16, 12)  # width, heads, layers
SUMMARIES = {"task_specific_params": {"summarization": {"length_penalty": 1.0, "max_length": 128, "num_beams": 4}}}
GATED = {"d_ff": 1024, "feed_forward_proj": "gated-gelu", "num_heads": 6, "num_layers": 8, "num_decoder_layers": 8}
PRE_NORM = {"add_final_layer_norm": True, "normalize_before": True, "scale_embedding": True}
SINUSOIDS = {"static_position_embeddings": True, "normalize_embedding": False, "scale_embedding": True}
MBART = {"model_type": "mbart", "architectures": ["MBartForConditionalGeneration"], "normalize_embedding": True}

# name -> (config, parameters: tied tables once, and the bias of the logits)
HUB: dict[str, tuple[dict[str, Any], int]] = {
    "t5-small": (
        t5(d_ff=2048, num_layers=6, num_decoder_layers=6, num_heads=8, **SUMMARIES),
        60_506_624,
    ),
    "google/t5-v1_1-small": (t5(**GATED, tie_word_embeddings=False), 76_961_152),
    "google/flan-t5-small": (
        t5(
            **GATED,
            tie_word_embeddings=False,
            dense_act_fn="gelu_new",
            is_gated_act=True,
            relative_attention_max_distance=128,
            transformers_version="4.23.1",
        ),
        76_961_152,
    ),
    "facebook/bart-base": (
        bart(
            *BASE,
            architectures=["BartModel"],
            model_type="bart",
            early_stopping=True,
            forced_bos_token_id=0,
            no_repeat_ngram_size=3,
            normalize_embedding=True,
            num_beams=4,
            torch_dtype="float32",
            **SUMMARIES,
        ),
        139_420_416 + 50_265,
    ),
    "facebook/bart-large-cnn": (
        bart(
            *LARGE,
            architectures=["BartForConditionalGeneration"],
            model_type="bart",
            early_stopping=True,
            force_bos_token_to_be_generated=True,
            length_penalty=2.0,
            max_length=142,
            min_length=56,
            no_repeat_ngram_size=3,
            num_beams=4,
            output_past=True,
            prefix=" ",
            vocab_size=50264,
            **SUMMARIES,
        ),
        406_290_432 + 50_264,
    ),
    "facebook/bart-large-mnli": (
        bart(
            *LARGE,
            architectures=["BartForSequenceClassification"],
            model_type="bart",
            id2label={"0": "contradiction", "1": "neutral", "2": "entailment"},
            label2id={"contradiction": 0, "entailment": 2, "neutral": 1},
            output_past=False,
        ),
        406_291_456 + 1024 * 1025 + 3 * 1025,
    ),
    "facebook/mbart-large-en-ro": (
        bart(
            *LARGE,
            **MBART,
            **PRE_NORM,
            max_length=200,
            num_beams=5,
            static_position_embeddings=False,
            extra_pos_embeddings=2,
            save_step=3,
            task_specific_params={"translation_en_to_ro": {"decoder_start_token_id": 250020}},
            vocab_size=250027,
        ),
        610_851_840 + 250_027,
    ),
    "facebook/mbart-large-50-many-to-many-mmt": (
        bart(
            *LARGE,
            **MBART,
            **PRE_NORM,
            activation_function="relu",
            early_stopping=True,
            max_length=200,
            num_beams=5,
            output_past=True,
            static_position_embeddings=False,
            tokenizer_class="MBart50Tokenizer",
            vocab_size=250054,
        ),
        610_879_488 + 250_054,
    ),
    "google/pegasus-xsum": (
        bart(
            *(1024, 16, 16),
            **PRE_NORM | SINUSOIDS,
            activation_function="relu",
            architectures=["PegasusForConditionalGeneration"],
            decoder_start_token_id=0,
            do_blenderbot_90_layernorm=False,
            eos_token_id=1,
            extra_pos_embeddings=0,
            force_bos_token_to_be_generated=False,
            forced_eos_token_id=1,
            length_penalty=0.6,
            max_length=64,
            max_position_embeddings=512,
            model_type="pegasus",
            num_beams=8,
            pad_token_id=0,
            vocab_size=96103,
        ),
        568_699_904 + 96_103,
    ),
    "Helsinki-NLP/opus-mt-en-de": (
        bart(
            *(512, 8, 6),
            **SINUSOIDS,
            activation_dropout=0.0,
            activation_function="swish",
            architectures=["MarianMTModel"],
            attention_dropout=0.0,
            bad_words_ids=[[58100]],
            decoder_start_token_id=58100,
            decoder_vocab_size=58101,
            eos_token_id=0,
            extra_pos_embeddings=58101,
            force_bos_token_to_be_generated=False,
            forced_eos_token_id=0,
            max_length=512,
            max_position_embeddings=512,
            model_type="marian",
            num_beams=6,
            pad_token_id=58100,
            share_encoder_decoder_embeddings=True,
            vocab_size=58101,
        ),
        73_886_208 + 58_101,
    ),
    "facebook/m2m100_418M": (
        fairseq(
            1024, 16, 12, model_type="m2m_100", architectures=["M2M100ForConditionalGeneration"], vocab_size=128112
        ),
        483_905_536,
    ),
    "facebook/nllb-200-distilled-600M": (
        fairseq(
            *(1024, 16, 12),
            architectures=["M2M100ForConditionalGeneration"],
            decoder_layerdrop=0,
            encoder_layerdrop=0,
            model_type="m2m_100",
            tokenizer_class="NllbTokenizer",
            vocab_size=256206,
        ),
        615_073_792,
    ),
    "facebook/wmt19-en-de": (
        fairseq(
            *(1024, 16, 6),
            architectures=["FSMTForConditionalGeneration"],
            decoder={"bos_token_id": 2, "model_type": "fsmt_decoder", "vocab_size": 42024},
            encoder_ffn_dim=8192,
            langs=["en", "de"],
            length_penalty=1.15,
            model_type="fsmt",
            src_vocab_size=42024,
            tgt_vocab_size=42024,
            tie_word_embeddings=False,
        ),
        355_811_328,
    ),
    "facebook/blenderbot-400M-distill": (
        bart(
            *(1280, 32, 12),
            **PRE_NORM,
            architectures=["BlenderbotForConditionalGeneration"],
            bos_token_id=1,
            decoder_start_token_id=1,
            do_blenderbot_90_layernorm=True,
            encoder_layers=2,
            encoder_no_repeat_ngram_size=3,
            extra_layer_norm=False,
            extra_pos_embeddings=0,
            layernorm_variant="prelayernorm",
            length_penalty=0.65,
            max_length=60,
            max_position_embeddings=128,
            min_length=20,
            model_type="blenderbot",
            normalize_embedding=False,
            num_beams=10,
            num_hidden_layers=2,
            pad_token_id=0,
            static_position_embeddings=False,
            unk_token_id=3,
            vocab_size=8008,
        ),
        364_802_560 + 8008,
    ),
    "google/umt5-small": (
        t5(
            **GATED,
            architectures=["UMT5ForConditionalGeneration"],
            classifier_dropout=0.0,
            dense_act_fn="gelu_new",
            is_gated_act=True,
            model_type="umt5",
            relative_attention_max_distance=128,
            scalable_attention=True,
            tie_word_embeddings=False,
            tokenizer_class="T5Tokenizer",
            vocab_size=256384,
        ),
        306_601_984,
    ),
}
