"""Tiny random models, one for every decoder of transformers that AutoModelForCausalLM can build.

``build(name)`` shrinks the default configuration of a model type by a table of sizes, applies the type's own
adjustments, and gives every parameter a random value of sensible size, so that no gate, bias or router is zero.
"""

from __future__ import annotations

import logging
import math
import warnings

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.models import float64

VOCAB = 128
WINDOW = 8

# What each size is called in one configuration or another, and what it becomes here.
SIZES: dict[str, object] = {
    # width and vocabulary
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "emb_dim", "embedding_dim", "input_embedding_size"), 64),
    **dict.fromkeys(("embedding_size", "word_embed_proj_dim", "output_embedding_size"), 64),
    **dict.fromkeys(("vocab_size", "decoder_vocab_size", "unpadded_vocab_size", "vocab_size_per_layer_input"), VOCAB),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "n_inner", "dff"), 64),
    **dict.fromkeys(("dim_ff", "d_inner", "ffn_hidden_size", "intermediate_size_mlp", "feed_forward_size"), 64),
    **dict.fromkeys(("dense_intermediate_size", "prefix_dense_intermediate_size"), 64),
    # heads
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "attention_heads", "num_encoder_attention_heads"), 4),
    **dict.fromkeys(("num_decoder_attention_heads", "swa_num_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads", "num_query_groups"), 2),
    **dict.fromkeys(("head_dim", "dim_head", "d_head", "kv_channels", "swa_head_dim", "attention_head_size"), 16),
    "global_head_dim": 16,
    "rotary_dim": 8,
    # latent attention
    **dict.fromkeys(("q_lora_rank", "o_lora_rank"), 24),
    "kv_lora_rank": 16,
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 8),
    "qk_head_dim": 16,
    **dict.fromkeys(("index_n_heads",), 2),
    **dict.fromkeys(("index_head_dim",), 16),
    "index_topk": 6,
    # positions and windows
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "model_max_length"), 512),
    **dict.fromkeys(("context_length", "max_target_positions", "max_source_positions"), 512),
    **dict.fromkeys(("sliding_window", "window_size", "attention_window_size", "local_attention"), WINDOW),
    **dict.fromkeys(("sliding_window_size", "attention_chunk_size", "keep_window_size"), WINDOW),
    # experts
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 8),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "num_experts_per_token", "top_k_experts"), 2),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 32),
    **dict.fromkeys(("shared_intermediate_size", "shared_experts_intermediate_size"), 32),
    "moe_shared_expert_intermediate_size": 32,
    **dict.fromkeys(("n_group", "num_expert_group"), 2),
    "topk_group": 1,
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"), 1),
    "zero_expert_num": 2,
    # recurrences and convolutions
    **dict.fromkeys(("linear_num_key_heads",), 2),
    **dict.fromkeys(("linear_num_value_heads", "linear_num_heads", "mamba_n_heads", "mamba_num_heads"), 4),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), 16),
    **dict.fromkeys(("mamba_d_state", "state_size", "ssm_state_size"), 8),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size"), 8),
    **dict.fromkeys(("mamba_n_groups", "mamba_ngroups", "n_groups"), 1),
    **dict.fromkeys(("time_step_rank", "mamba_dt_rank"), 4),
    "lru_width": 64,
    # the rest
    **dict.fromkeys(("altup_num_inputs",), 2),
    "laurel_rank": 8,
    "hidden_size_per_layer_input": 8,
}
LAYER_COUNTS = (
    "num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers", "num_blocks",
    "num_encoder_layers", "num_decoder_layers", "num_layers_per_stack",
)  # fmt: skip
SPECIAL_TOKENS = (
    "pad_token_id", "bos_token_id", "eos_token_id", "sep_token_id", "cls_token_id", "decoder_start_token_id",
)  # fmt: skip
PATTERNS = ("layer_types", "mlp_layer_types", "indexer_types", "layers_block_type", "block_types")


# Models of the mapping that aren't decoders of tokens, or that can't be built or run here.
EXCLUDED: dict[str, str] = {
    "blt": "bytes are grouped into patches by their values",
    "cpmant": "attends to the whole prompt in both directions, told by the values of the tokens",
    "dots3_note": "the vision tower's sizes hang on the text model's; dots3_note_text is the decoder",
    "gemma3n": "needs timm; gemma3n_text is the decoder",
    "gemma4_assistant": "drafts from another model's keys and values",
    "gemma4_unified_assistant": "drafts from another model's keys and values",
    "musicgen": "several codebooks of audio, not tokens",
    "musicgen_melody": "several codebooks of audio, not tokens",
    "reformer": "buckets keys by random hashes, and cuts the row into chunks that must divide its length",
    "xglm": "takes the limit of float64 for one of float32",
    "xlm": "an encoder",
    "xlnet": "attends in both directions",
}
# Something besides attention carries information from token to token: a recurrence or a convolution.
RECURRENT = frozenset((
    "bailing_hybrid", "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "inkling2_loop_text",
    "inkling2_text", "inkling_text", "jamba", "kimi_linear", "lara_mini", "lfm2", "lfm2_moe", "lfm3", "mamba",
    "mamba2", "minimax", "nemotron_h", "olmo_hybrid", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text",
    "qwen3_next", "qwen4_exp", "qwen4_exp_text", "recurrent_gemma", "rwkv", "xlstm", "zamba", "zamba2", "zaya",
))  # fmt: skip
# Keys are chosen by their values or by an arrangement of the whole row, or the model branches on its inputs.
OTHER = frozenset((
    "axk2", "big_bird", "bigbird_pegasus", "dbrx", "deepseek_v32", "deepseek_v4", "doge", "dots3_note_text",
    "glm_moe_dsa", "hy_v4", "llama-dynamic", "longcat_flash", "minimax_m3_vl_text", "prophetnet",
))  # fmt: skip

# A model type with a part of its configuration changed.
VARIANTS: dict[str, tuple[str, dict[str, object]]] = {
    "llama-yarn": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16,
            }
        },
    ),
    "llama-llama3": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
            }
        },
    ),
    "llama-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    "llama-dynamic": (
        "llama",
        {
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
            "max_position_embeddings": 16,
        },
    ),
    "phi3-longrope": (
        "phi3",
        {
            "rope_parameters": {
                "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8,
                "long_factor": [1.0 + 0.5 * index for index in range(8)], "original_max_position_embeddings": 16,
                "partial_rotary_factor": 1.0,
            },
            "original_max_position_embeddings": 16,
        },
    ),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-one_kv_head": ("llama", {"num_key_value_heads": 1}),
    "llama-one_layer": ("llama", {"num_hidden_layers": 1}),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3-sliding": (
        "qwen3",
        {
            "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1,
            "layer_types": ["full_attention", "sliding_attention"],
        },
    ),
    "mistral-narrow_window": ("mistral", {"sliding_window": 2}),
    "falcon-alibi": ("falcon", {"alibi": True}),
    "falcon-new_decoder": ("falcon", {"new_decoder_architecture": True, "alibi": False}),
    "olmo-clipped": ("olmo", {"clip_qkv": 0.5}),
    "gemma4-shared_kv": (
        "gemma4_text",
        {
            "num_hidden_layers": 4, "num_kv_shared_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    "stablelm-qk_norm": ("stablelm", {"qk_layernorm": True, "use_parallel_residual": True}),
    "cohere-qk_norm": ("cohere", {"use_qk_norm": True}),
    "gpt_neox-sequential": ("gpt_neox", {"use_parallel_residual": False}),
    "qwen3_moe-dense_and_sparse": ("qwen3_moe", {"mlp_only_layers": [0]}),
}  # fmt: skip


def names() -> list[str]:
    """Every model type of the causal language model mapping that is a decoder and runs here."""
    return [name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name not in EXCLUDED]


def mixing(name: str) -> str:
    """How tokens meet in a model (or variant): "attention" alone, "recurrent" too, or "other"."""
    kinds = {name, VARIANTS[name][0]} if name in VARIANTS else {name}
    return "recurrent" if kinds & RECURRENT else "other" if kinds & OTHER else "attention"


# What shrinking by name alone gets wrong, by model type: values, or None to leave the default alone.
DECODER: dict[str, object] = {"is_decoder": True}
SHORT_CONV: dict[str, object] = {"layer_types": ["conv", "full_attention"]}
GROUPED: dict[str, object] = {"head_dim": 16, "num_key_value_heads": 2}
LATENT: dict[str, object] = {"num_key_value_heads": 4}
# fmt: off
ADJUST: dict[str, dict[str, object]] = {
    **dict.fromkeys(
        (
            "bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert",
            "rembert", "roberta", "roberta-prelayernorm", "roformer", "xlm-roberta", "xlm-roberta-xl",
        ),
        DECODER,
    ),
    **dict.fromkeys(
        (
            "axk1", "axk2", "bailing_hybrid", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite",
            "glm_moe_dsa", "kimi_linear", "longcat_flash", "minicpm3", "sarvam_mla", "youtu",
        ),
        LATENT,
    ),
    "big_bird": {**DECODER, "attention_type": "original_full"},
    "bigbird_pegasus": {"attention_type": "original_full"},
    "roc_bert": {
        **DECODER, "pronunciation_vocab_size": VOCAB, "shape_vocab_size": VOCAB,
        "pronunciation_embed_dim": 16, "shape_embed_dim": 16,
    },
    "rwkv": {"attention_hidden_size": 64, "rescale_every": 0},
    "xlstm": {"qk_dim_factor": 1.0, "mode": "train", "chunk_size": 8},
    "xmod": {**DECODER, "default_language": "en_XX"},
    "longcat_flash": {**LATENT, "head_dim": 8},
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]},
            "full_attention": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]},
        },
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 2.0, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 32, "hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {
        **LATENT, "num_experts_per_tok": 2, "topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 1,
    },
    "dots1": {"num_experts_per_tok": 2, "n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "dots3_note_text": {
        **LATENT, "head_dim": 16, "layer_types": ["indexed_attention", "sliding_attention"],
        "rope_parameters": None,
        "per_layer_config": {
            1: {
                "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16,
                "head_dim": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
            }
        },
    },
    "gemma3n_text": {
        "num_hidden_layers": 4, "num_kv_shared_layers": 2, "activation_sparsity_pattern": [0.5, 0.0, 0.5, 0.0],
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "attention_layers": ["global", "local"]},
    **dict.fromkeys(("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral", "nemotron"), GROUPED),
    **dict.fromkeys(("lfm2", "lfm2_moe"), SHORT_CONV),
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "qwen4_exp_text": {
        "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8,
        "indexer_compress_ratio": 2, "hc_count": 2, "hc_lowrank": 8,
    },
    "zamba": {
        "num_hidden_layers": 3, "layers_block_type": ["linear_attention", "hybrid", "hybrid"], "n_mamba_heads": 2,
        "attention_head_dim": 32, "num_key_value_heads": 4,
    },
    "zamba2": {
        "num_hidden_layers": 3, "layers_block_type": ["mamba", "hybrid", "hybrid"], "mamba_headdim": 16,
        "num_key_value_heads": 4, "mamba_expand": 2,
    },
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
}
# fmt: on


def shrink(config: PretrainedConfig, layers: int) -> dict[str, object]:
    """Keyword arguments that rebuild `config` small."""
    kwargs: dict[str, object] = {}
    values = {key: value for key, value in vars(config).items() if not key.startswith("_")}
    counts = layers
    for key in PATTERNS:
        if values.get(key):
            counts = max(counts, len(dict.fromkeys(values[key])))
    for key, value in values.items():
        if isinstance(value, PretrainedConfig):
            kwargs[key] = {"model_type": value.model_type, **shrink(value, layers)}
        elif key in SIZES and value is not None and not isinstance(value, bool):
            kwargs[key] = SIZES[key]
        elif key in LAYER_COUNTS:
            kwargs[key] = counts
        elif key in PATTERNS and value:
            kinds = list(dict.fromkeys(value))
            kwargs[key] = [kinds[index % len(kinds)] for index in range(counts)]
        elif isinstance(value, float) and ("dropout" in key or "drop" in key or key.endswith("_pdrop")):
            kwargs[key] = 0.0
        elif key in SPECIAL_TOKENS and (isinstance(value, int) or ("pad" in key and "text" in config.model_type)):
            kwargs[key] = 1
    if "qk_rope_head_dim" in values:
        kwargs.pop("head_dim", None)
        kwargs.pop("qk_head_dim", None)
    kwargs.update(ADJUST.get(config.model_type, {}))
    return kwargs


def config_of(name: str, *, layers: int = 2, **overrides: object) -> PretrainedConfig:
    """The small configuration of a model type."""
    cls = CONFIG_MAPPING[name]
    kwargs = shrink(cls(), layers)
    kwargs.update(overrides)
    return cls(**kwargs)


def build(
    name: str,
    *,
    attention: str = "sdpa",
    dtype: torch.dtype = torch.float64,
    layers: int = 2,
    seed: int = 0,
    float64_inside: bool = True,
    **overrides: object,
) -> nn.Module:
    """A tiny random model of a type or variant, in eval mode; `overrides` are configuration values.

    A type that has no `attention` of the kind asked for gets its own, written out. With `float64_inside` (and
    dtype float64) the type's modelling code computes in float64 what it would in float32, else as it was written: it
    holds for all models of the type, until one is built the other way. The sum of rounded gradients isn't the rounded
    sum, so a norm in float32 hides errors below 1e-7.
    """
    if name in VARIANTS:
        name, changed = VARIANTS[name]
        overrides = {**changed, **overrides}
    modules = float64.for_model(name)
    if float64_inside and dtype == torch.float64:
        float64.apply(modules)
    else:
        float64.restore(modules)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = config_of(name, layers=layers, **overrides)
        for part in (config, *(v for v in vars(config).values() if isinstance(v, PretrainedConfig))):
            part._experts_implementation = "batched_mm"
        torch.manual_seed(seed)
        try:
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
        except ValueError as error:
            if "does not support an attention implementation" not in str(error):
                raise
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")
    randomise(model, seed)
    return model.eval()


KEEP_NEAR_INITIAL = ("A_log", "dt_bias", "dt_proj.bias", "rg_lru", "time_decay", "time_first")


@torch.no_grad()
def randomise(model: nn.Module, seed: int) -> None:
    """Random values of sensible size for every parameter and every zero bias buffer."""
    generator = torch.Generator().manual_seed(seed + 1)

    def noise(tensor: torch.Tensor) -> torch.Tensor:
        return torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(tensor.dtype)

    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point():
            continue
        if parameter.ndim < 2 or any(part in name for part in KEEP_NEAR_INITIAL):
            parameter.copy_(torch.nan_to_num(parameter).clamp(-8, 8) + 0.1 * noise(parameter))
        elif id(parameter) in embeddings:
            parameter.copy_(0.2 * noise(parameter))
        else:
            parameter.copy_(noise(parameter) / math.sqrt(parameter.shape[-1]))
    for name, buffer in model.named_buffers():
        if name.endswith("bias") and buffer.is_floating_point() and not buffer.any():
            buffer.add_(0.1 * noise(buffer))
