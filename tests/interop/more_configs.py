"""Further configurations as published: values that other public repositories copied from the files on the hub."""

from __future__ import annotations

from typing import Any

from tests.interop.decoder_configs import (
    LLAMA_2_7B,
    LLAMA_3_8B,
    MISTRAL_7B,
    PHI_3_MINI_4K,
    PHI_4_MINI,
    PYTHIA_70M,
    QWEN2_05B,
    STABLELM_3B,
    STARCODER_1B,
)
from tests.interop.encoder_configs import BERT, OF_BASE
from tests.interop.gemma_configs import GEMMA2_2B
from tests.interop.hub_seq2seq import LARGE, SUMMARIES, bart

LONG = [  # of Phi-3.5-mini
    *(1.0800000429153442, 1.1100000143051147, 1.1399999856948853, 1.340000033378601, 1.5899999141693115),
    *(1.600000023841858, 1.6200000047683716, 2.620000123977661, 3.2300000190734863, 3.2300000190734863),
    *(4.789999961853027, 7.400000095367432, 7.700000286102295, 9.09000015258789, 12.199999809265137),
    *(17.670000076293945, 24.46000099182129, 28.57000160217285, 30.420001983642578, 30.840002059936523),
    *(32.590003967285156, 32.93000411987305, 42.320003509521484, 44.96000289916992, 50.340003967285156),
    *(50.45000457763672, 57.55000305175781, 57.93000411987305, 58.21000289916992, 60.1400032043457),
    *(62.61000442504883, 62.62000274658203, 62.71000289916992, 63.1400032043457, 63.1400032043457),
    *(63.77000427246094, 63.93000411987305, 63.96000289916992, 63.970001220703125, 64.02999877929688),
    *(64.06999969482422, 64.08000183105469, 64.12000274658203, 64.41000366210938, 64.4800033569336),
    *(64.51000213623047, 64.52999877929688, 64.83999633789062),
]
SHORT = [
    *(1.0, 1.0199999809265137, 1.0299999713897705, 1.0299999713897705, *[1.0499999523162842] * 5, 1.0699999332427979),
    *(1.0999999046325684, 1.1099998950958252, 1.1599998474121094, 1.1599998474121094, 1.1699998378753662),
    *(1.2899998426437378, 1.339999794960022, 1.679999828338623, 1.7899998426437378, 1.8199998140335083),
    *(1.8499997854232788, 1.8799997568130493, 1.9099997282028198, 1.9399996995925903, 1.9899996519088745),
    *([2.0199997425079346] * 7 + [2.0299997329711914] * 8),
    *(2.0799996852874756, 2.0899996757507324, 2.189999580383301, 2.2199995517730713, 2.5899994373321533),
    *(2.729999542236328, 2.749999523162842, 2.8399994373321533),
]
LONG_OF_PHI_4 = [
    *(1, 1.118320672, 1.250641126, 1.398617824, 1.564103225, 1.74916897, 1.956131817, 2.187582649, 2.446418898),
    *(2.735880826, 3.059592084, 3.421605075, 3.826451687, 4.279200023, 4.785517845, 5.351743533, 5.984965424),
    *(6.693110555, 7.485043894, 8.370679318, 9.36110372, 10.4687158, 11.70738129, 13.09260651, 14.64173252),
    *(16.37415215, 18.31155283, 20.47818807, 22.90118105, 25.61086418, 28.64115884, 32.03, 32.1, 32.13, 32.23, 32.6),
    *(32.61, 32.64, 32.66, 32.7, 32.71, 32.93, 32.97, 33.28, 33.49, 33.5, 44.16, 47.77),
]


def code_llama(**sizes: int) -> dict[str, Any]:
    return LLAMA_2_7B | {"max_position_embeddings": 16384, "rope_theta": 1000000, "vocab_size": 32016, **sizes}


def llama_3_1(factor: float = 8.0, **values: Any) -> dict[str, Any]:
    stretched = {"factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_type": "llama3"}
    rope = {"rope_scaling": {**stretched, "original_max_position_embeddings": 8192}}
    return LLAMA_3_8B | rope | {"max_position_embeddings": 131072, "mlp_bias": False, **values}


def qwen2(width: int, hidden: int, layers: int, heads: int, groups: int, **values: Any) -> dict[str, Any]:
    sizes = {
        "hidden_size": width,
        "intermediate_size": hidden,
        "num_hidden_layers": layers,
        "max_window_layers": layers,
    }
    return QWEN2_05B | sizes | {"num_attention_heads": heads, "num_key_value_heads": groups, **values}


def qwen3(width: int, hidden: int, layers: int, heads: int, *, tied: bool) -> dict[str, Any]:
    sizes = {"attention_bias": False, "head_dim": 128, "max_position_embeddings": 40960, "rope_theta": 1000000}
    names = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "eos_token_id": 151645}
    none = {"rope_scaling": None, "sliding_window": None, "tie_word_embeddings": tied}
    return qwen2(width, hidden, layers, heads, 8) | names | sizes | none


def bert(**values: Any) -> dict[str, Any]:
    return BERT | {"architectures": ["BertModel"], "classifier_dropout": None, **values}


GOOGLE = {
    **{"directionality": "bidi", "pooler_fc_size": 768, "pooler_num_attention_heads": 12, "pooler_num_fc_layers": 3},
    **{"pooler_size_per_head": 128, "pooler_type": "first_token_transform"},
}
UNTIED = {"tie_word_embeddings": False, "vocab_size": 152064}
PRESETS = "mlc-ai/mlc-llm: python/mlc_llm/model/model_preset.py"
PROFILES = "citsjtu2020/LLM-Prof: sglang/Model_Config.md"
# name on the hub -> (config, repository and file of GitHub that its values were read in)
MORE: dict[str, tuple[dict[str, Any], str]] = {
    "codellama/CodeLlama-7b-hf": (code_llama(), PRESETS),
    "codellama/CodeLlama-34b-hf": (
        code_llama(
            hidden_size=8192,
            intermediate_size=22016,
            num_attention_heads=64,
            num_hidden_layers=48,
            num_key_value_heads=8,
        ),
        PRESETS,
    ),
    "meta-llama/Llama-3.1-8B": (llama_3_1(), PROFILES),
    "meta-llama/Llama-3.1-70B-Instruct": (
        llama_3_1(
            eos_token_id=[128001, 128008, 128009],
            hidden_size=8192,
            intermediate_size=28672,
            num_attention_heads=64,
            num_hidden_layers=80,
        ),
        PRESETS,
    ),
    "meta-llama/Llama-3.2-3B": (
        llama_3_1(
            32.0,
            head_dim=128,
            hidden_size=3072,
            intermediate_size=8192,
            num_attention_heads=24,
            num_hidden_layers=28,
            tie_word_embeddings=True,
        ),
        PROFILES,
    ),
    "mistralai/Mistral-7B-v0.1": (
        MISTRAL_7B | {"rope_theta": 10000.0, "sliding_window": 4096, "vocab_size": 32000},
        PRESETS,
    ),
    "Qwen/Qwen1.5-1.8B-Chat": (
        qwen2(2048, 5504, 24, 16, 16, eos_token_id=151645, max_position_embeddings=4096, sliding_window=32768)
        | {"max_window_layers": 21},
        PRESETS,
    ),
    "Qwen/Qwen2-1.5B-Instruct": (
        qwen2(1536, 8960, 28, 12, 2, eos_token_id=151645, max_position_embeddings=32768, sliding_window=32768),
        PRESETS,
    ),
    "Qwen/Qwen2.5-3B": (qwen2(2048, 11008, 36, 16, 2, max_position_embeddings=32768, sliding_window=32768), PROFILES),
    "Qwen/Qwen2.5-14B": (qwen2(5120, 13824, 48, 40, 8, rms_norm_eps=1e-05, **UNTIED), PROFILES),
    "Qwen/Qwen2.5-32B": (qwen2(5120, 27648, 64, 40, 8, rms_norm_eps=1e-05, **UNTIED), PROFILES),
    "Qwen/Qwen3-0.6B": (qwen3(1024, 3072, 28, 16, tied=True), PRESETS),
    "Qwen/Qwen3-4B": (qwen3(2560, 9728, 36, 32, tied=True), PROFILES),
    "Qwen/Qwen3-14B": (qwen3(5120, 17408, 40, 40, tied=False), PROFILES),
    "Qwen/Qwen3-32B": (qwen3(5120, 25600, 64, 64, tied=False), PROFILES),
    "google/gemma-2-27b": (
        GEMMA2_2B
        | {"head_dim": 128, "hidden_size": 4608, "intermediate_size": 36864, "query_pre_attn_scalar": 144}
        | {"num_attention_heads": 32, "num_hidden_layers": 46, "num_key_value_heads": 16},
        PRESETS,
    ),
    "google/gemma-2-2b-jpn-it": (
        {key: value for key, value in GEMMA2_2B.items() if key != "hidden_act"} | {"query_pre_attn_scalar": 224},
        PRESETS,
    ),
    "togethercomputer/RedPajama-INCITE-Base-3B-v1": (
        PYTHIA_70M
        | {"hidden_size": 2560, "intermediate_size": 10240, "num_attention_heads": 32, "num_hidden_layers": 32}
        | {"rotary_pct": 1.0, "use_parallel_residual": False, "vocab_size": 50432},
        PRESETS,
    ),
    "stabilityai/stablelm-2-zephyr-1_6b": (
        STABLELM_3B
        | {"bos_token_id": 100257, "eos_token_id": 100257, "hidden_size": 2048, "intermediate_size": 5632}
        | {"num_hidden_layers": 24, "use_qkv_bias": True, "vocab_size": 100352},
        PRESETS,
    ),
    "microsoft/Phi-3.5-mini-instruct": (
        PHI_3_MINI_4K
        | {"max_position_embeddings": 131072, "sliding_window": 262144}
        | {"rope_scaling": {"long_factor": LONG, "short_factor": SHORT, "type": "longrope"}},
        PRESETS,
    ),
    "microsoft/Phi-4-mini-instruct": (
        PHI_4_MINI | {"rope_scaling": {"long_factor": LONG_OF_PHI_4, "short_factor": [1.0] * 48, "type": "longrope"}},
        PRESETS,
    ),
    "bigcode/gpt_bigcode-santacoder": (
        {key: STARCODER_1B[key] for key in STARCODER_1B if "_runner" not in key and "max_" not in key}
        | {"bos_token_id": 49152, "eos_token_id": 49152, "n_positions": 2048, "vocab_size": 49280},
        PRESETS,
    ),
    "Snowflake/snowflake-arctic-embed-m": (bert(), PRESETS),
    "BAAI/bge-small-en-v1.5": (
        bert(hidden_size=384, intermediate_size=1536, id2label={"0": "LABEL_0"}, label2id={"LABEL_0": 0}),
        "adityajn109-lab/autogen-project: bge-small-en-v1.5/config.json",
    ),
    "sentence-transformers/all-MiniLM-L6-v2": (
        bert(hidden_size=384, intermediate_size=1536, num_hidden_layers=6),
        "alex-anhvuong/Semantic-text-similarity-POC: all-MiniLM-L6-v2/config.json",
    ),
    "bert-base-chinese": (
        {
            **{key: BERT[key] for key in OF_BASE},
            **GOOGLE,
            **{"architectures": ["BertForMaskedLM"], "model_type": "bert", "type_vocab_size": 2, "vocab_size": 21128},
        },
        "jxlin98/CWS: bert-base-chinese/config.json",
    ),
    "dmis-lab/biobert-base-cased-v1.1": (
        bert(vocab_size=28996),
        "owenp28/Biobert_ChatbotNLP: biobert-base-cased-v1.1/config.json",
    ),
    "sentence-transformers/all-mpnet-base-v2": (
        OF_BASE
        | {"architectures": ["MPNetForMaskedLM"], "model_type": "mpnet", "layer_norm_eps": 1e-05, "vocab_size": 30527}
        | {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1, "max_position_embeddings": 514}
        | {"relative_attention_num_buckets": 32},
        "dbalikhin/onnx: all-mpnet-base-v2/config.json",
    ),
    "google/vit-base-patch16-224": (
        {
            **{key: BERT[key] for key in OF_BASE if key != "max_position_embeddings"},
            **{"architectures": ["ViTForImageClassification"], "model_type": "vit", "encoder_stride": 16},
            **{"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0, "layer_norm_eps": 1e-12},
            **{"image_size": 224, "num_channels": 3, "patch_size": 16, "qkv_bias": True},
            "id2label": {"0": "tench, Tinca tinca", "1": "goldfish, Carassius auratus"},  # of 1,000
            "label2id": {"tench, Tinca tinca": 0, "goldfish, Carassius auratus": 1},
        },
        "Vukkisa/AI-ML: vit-base-patch16-224/config.json",
    ),
    "facebook/bart-large": (
        bart(
            *LARGE,
            architectures=["BartModel"],
            model_type="bart",
            classif_dropout=0.1,
            early_stopping=True,
            no_repeat_ngram_size=3,
            num_beams=4,
            **SUMMARIES,
        ),
        "simonaz/Bart_T5-summarization: bart-large/config.json",
    ),
}
