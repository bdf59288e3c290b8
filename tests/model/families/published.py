"""Models as published: the sizes of their config.json, and how many parameters their authors or files say they have.

Numbers of `safetensors` are of the weights on the model's page (the sum that the page shows, also total_size of its
index over the bytes of a number). Where a file holds more than the model, what was taken off stands beside it.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Published:
    name: str
    config: dict[str, Any]
    parameters: int
    source: str
    active: float | None = None  # of a token, in billions


def _llama(
    kind: str, vocab: int, width: int, ffn: int, layers: int, heads: int, kv: int, **more: Any
) -> dict[str, Any]:
    return {
        "model_type": kind, "vocab_size": vocab, "hidden_size": width, "intermediate_size": ffn,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv, **more,
    }  # fmt: skip


def _deepseek(kind: str, vocab: int, width: int, ffn: int, layers: int, heads: int, **more: Any) -> dict[str, Any]:
    latent = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    return _llama(kind, vocab, width, ffn, layers, heads, heads, **latent | more)


PUBLISHED = (
    Published("GPT-2", {"model_type": "gpt2"}, 124_439_808, "openai-community/gpt2, safetensors less its masks"),
    Published(
        "GPT-2 XL", {"model_type": "gpt2", "n_embd": 1600, "n_layer": 48, "n_head": 25}, 1_557_611_200,
        "openai-community/gpt2-xl, safetensors less its masks",
    ),
    Published(
        "Llama 2 7B", _llama("llama", 32_000, 4096, 11_008, 32, 32, 32), 6_738_415_616,
        "meta-llama/Llama-2-7b-hf, safetensors less rotary tables",
    ),
    Published(
        "Llama 2 70B", _llama("llama", 32_000, 8192, 28_672, 80, 64, 8), 68_976_648_192,
        "meta-llama/Llama-2-70b-hf, safetensors less rotary tables",
    ),
    Published(
        "Llama 3.1 8B", _llama("llama", 128_256, 4096, 14_336, 32, 32, 8), 8_030_261_248,
        "meta-llama/Llama-3.1-8B, safetensors",
    ),
    Published(
        "Llama 3.1 405B", _llama("llama", 128_256, 16_384, 53_248, 126, 128, 8), 405_853_388_800,
        "meta-llama/Llama-3.1-405B, safetensors",
    ),
    Published(
        "Mistral 7B", _llama("mistral", 32_000, 4096, 14_336, 32, 32, 8, sliding_window=4096), 7_241_732_096,
        "mistralai/Mistral-7B-v0.1, safetensors",
    ),
    Published(
        "Qwen2.5 0.5B", _llama("qwen2", 151_936, 896, 4864, 24, 14, 2, tie_word_embeddings=True), 494_032_768,
        "Qwen/Qwen2.5-0.5B, safetensors",
    ),
    Published(
        "Qwen2 7B", _llama("qwen2", 152_064, 3584, 18_944, 28, 28, 4), 7_615_616_512, "Qwen/Qwen2-7B, safetensors"
    ),
    Published(
        "Qwen3 8B", _llama("qwen3", 151_936, 4096, 12_288, 36, 32, 8, head_dim=128), 8_190_735_360,
        "Qwen/Qwen3-8B, safetensors",
    ),
    Published(
        "Gemma 2 2B", _llama("gemma2", 256_000, 2304, 9216, 26, 8, 4, head_dim=256), 2_614_341_888,
        "google/gemma-2-2b, safetensors",
    ),
    Published(
        "Gemma 2 27B",
        _llama("gemma2", 256_000, 4608, 36_864, 46, 32, 16, head_dim=128, query_pre_attn_scalar=144), 27_227_128_320,
        "google/gemma-2-27b, safetensors",
    ),
    Published(
        "Gemma 3 1B", _llama("gemma3_text", 262_144, 1152, 6912, 26, 4, 1, head_dim=256, sliding_window=512),
        999_885_952, "google/gemma-3-1b-pt, safetensors",
    ),
    Published(
        "Phi-3 mini", _llama("phi3", 32_064, 3072, 8192, 32, 32, 32, sliding_window=2047), 3_821_079_552,
        "microsoft/Phi-3-mini-4k-instruct, safetensors",
    ),
    Published(
        "Phi-4", _llama("phi3", 100_352, 5120, 17_920, 40, 40, 10), 14_659_507_200, "microsoft/phi-4, safetensors"
    ),
    Published(
        "Pythia 6.9B",
        {"model_type": "gpt_neox", "vocab_size": 50_432, "hidden_size": 4096, "intermediate_size": 16_384,
         "num_hidden_layers": 32, "num_attention_heads": 32, "rotary_pct": 0.25, "tie_word_embeddings": False},
        6_857_302_016, "Biderman et al. 2023, table of the models (total parameters)",
    ),
    Published(
        "Pythia 12B",
        {"model_type": "gpt_neox", "vocab_size": 50_688, "hidden_size": 5120, "intermediate_size": 20_480,
         "num_hidden_layers": 36, "num_attention_heads": 40, "rotary_pct": 0.25, "tie_word_embeddings": False},
        11_846_072_320, "Biderman et al. 2023, table of the models (total parameters)",
    ),
    Published(
        "Falcon 7B",
        {"model_type": "falcon", "vocab_size": 65_024, "hidden_size": 4544, "num_hidden_layers": 32,
         "num_attention_heads": 71, "multi_query": True, "parallel_attn": True, "bias": False},
        7_217_189_760 - 65_024 * 4544, "tiiuae/falcon-7b, safetensors less the head, a copy of the embedding",
    ),
    Published(
        "BLOOM",
        {"model_type": "bloom", "vocab_size": 250_880, "hidden_size": 14_336, "n_layer": 70, "n_head": 112},
        176_247_271_424, "bigscience/bloom, model card",
    ),
    Published(
        "BLOOM 560M",
        {"model_type": "bloom", "vocab_size": 250_880, "hidden_size": 1024, "n_layer": 24, "n_head": 16},
        559_214_592, "bigscience/bloom-560m, model card",
    ),
    Published(
        "Mixtral 8x7B",
        _llama("mixtral", 32_000, 4096, 14_336, 32, 32, 8, num_local_experts=8, num_experts_per_tok=2), 46_702_792_704,
        "mistralai/Mixtral-8x7B-v0.1, safetensors; 12.9B active: its announcement", active=12.9,
    ),
    Published(
        "Mixtral 8x22B",
        _llama("mixtral", 32_000, 6144, 16_384, 56, 48, 8, num_local_experts=8, num_experts_per_tok=2), 140_620_634_112,
        "mistralai/Mixtral-8x22B-v0.1, safetensors; 39B active: its announcement", active=39,
    ),
    Published(
        "Qwen3 30B-A3B",
        _llama("qwen3_moe", 151_936, 2048, 6144, 48, 32, 4, head_dim=128, moe_intermediate_size=768, num_experts=128,
               num_experts_per_tok=8, norm_topk_prob=True),
        30_532_122_624, "Qwen/Qwen3-30B-A3B, safetensors; 3.3B active: its model card", active=3.3,
    ),
    Published(
        "DeepSeek-V2-Lite",
        _deepseek("deepseek_v2", 102_400, 2048, 10_944, 27, 16, q_lora_rank=None, n_routed_experts=64,
                  n_shared_experts=2, num_experts_per_tok=6, moe_intermediate_size=1408, first_k_dense_replace=1),
        15_706_484_224, "deepseek-ai/DeepSeek-V2-Lite, safetensors",
    ),
    Published(
        "DeepSeek-V2",
        _deepseek("deepseek_v2", 102_400, 5120, 12_288, 60, 128, q_lora_rank=1536, n_routed_experts=160,
                  n_shared_experts=2, num_experts_per_tok=6, moe_intermediate_size=1536, first_k_dense_replace=1,
                  n_group=8, topk_group=3, topk_method="group_limited_greedy"),
        235_741_434_880, "deepseek-ai/DeepSeek-V2, safetensors; 21B active: DeepSeek-AI 2024", active=21,
    ),
    Published(
        "DeepSeek-V3",
        _deepseek("deepseek_v3", 129_280, 7168, 18_432, 61, 128, q_lora_rank=1536, n_routed_experts=256,
                  n_shared_experts=1, num_experts_per_tok=8, moe_intermediate_size=2048, first_k_dense_replace=3,
                  n_group=8, topk_group=4),
        671_026_419_200 - 58 * 256,
        "deepseek-ai/DeepSeek-V3: 671B without the part that predicts further tokens, less the biases of the choice; "
        "37B active: DeepSeek-AI 2024", active=37,
    ),
    Published(
        "OLMo 2 1B", _llama("olmo2", 100_352, 2048, 8192, 16, 16, 16), 1_484_916_736,
        "allenai/OLMo-2-0425-1B, safetensors",
    ),
    Published(
        "OLMo 2 7B", _llama("olmo2", 100_352, 4096, 11_008, 32, 32, 32), 7_298_617_344,
        "allenai/OLMo-2-1124-7B, safetensors",
    ),
    Published(
        "OLMo 2 13B", _llama("olmo2", 100_352, 5120, 13_824, 40, 40, 40), 13_716_198_400,
        "allenai/OLMo-2-1124-13B, safetensors",
    ),
    Published(
        "Mamba-2 130M",
        {"model_type": "mamba2", "vocab_size": 50_288, "hidden_size": 768, "num_hidden_layers": 24, "num_heads": 24,
         "head_dim": 64, "state_size": 128, "n_groups": 1, "tie_word_embeddings": True},
        128_989_632, "state-spaces/mamba2-130m",
    ),
    Published(
        "Mamba-2 2.7B",
        {"model_type": "mamba2", "vocab_size": 50_288, "hidden_size": 2560, "num_hidden_layers": 64, "num_heads": 80,
         "head_dim": 64, "state_size": 128, "n_groups": 1, "tie_word_embeddings": True},
        2_702_599_680, "state-spaces/mamba2-2.7b",
    ),
    Published(
        "Codestral Mamba 7B",
        {"model_type": "mamba2", "vocab_size": 32_768, "hidden_size": 4096, "num_hidden_layers": 64, "num_heads": 128,
         "head_dim": 64, "state_size": 128, "n_groups": 8, "tie_word_embeddings": False},
        7_285_403_648, "mistralai/Mamba-Codestral-7B-v0.1, model card",
    ),
    Published("BERT base", {"model_type": "bert"}, 109_514_298, "google-bert/bert-base-uncased, for masked words"),
    Published(
        "BERT large",
        {"model_type": "bert", "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16,
         "intermediate_size": 4096},
        335_174_458, "google-bert/bert-large-uncased, for masked words",
    ),
    Published(
        "T5 small",
        {"model_type": "t5", "vocab_size": 32_128, "d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6,
         "num_heads": 8},
        60_506_624, "google-t5/t5-small, safetensors",
    ),
    Published(
        "T5 11B",
        {"model_type": "t5", "vocab_size": 32_128, "d_model": 1024, "d_kv": 128, "d_ff": 65_536, "num_layers": 24,
         "num_heads": 128},
        11_307_321_344, "google-t5/t5-11b",
    ),
)  # fmt: skip
