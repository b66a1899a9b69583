"""The architectures that are served, each by its differences from Llama.

A row holds what a model's class says and its config.json does not: what a missing key means, where
norms stand, how weights are named. What config.json itself says is read by `model/config.py`.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple


class Norms(NamedTuple):
    """Names of a layer's norms. Those of outputs are applied before the residual is added."""

    attention: str | None = "input_layernorm"
    attention_out: str | None = None
    mlp: str | None = "post_attention_layernorm"
    mlp_out: str | None = None


_PRE: Final = Norms()


@dataclass(frozen=True)
class Mixture:
    """A mixture of experts: fields of config.json, names of weights, and how it routes.

    Attributes:
        count, width, shared_width: fields of config.json: how many experts there are, and the
            intermediate sizes of one of them and of a shared one.
        prefix: of its weights, within the layer.
        each: gate, up and down projection of one expert.
        stacked: instead of `each`, gates and ups of all experts in one tensor, and the downs.
        transposed: of `stacked`, which lie [experts, in, out] then, gates and ups in turn, under
            names that do not end in ".weight".
        biased: the router and all projections of the experts have biases.
        shared: prefix of the shared experts, which are one feed-forward; where there are any.
        shared_gate: weight of a sigmoid gate on the shared experts' output.
        correction: weight of a bias that takes part in the choice of experts, not in their weights.
        may_normalize: norm_topk_prob true means what it says.
        group_best: a group of experts scores the sum of so many best ones of it.
    """

    count: str = "num_experts"
    width: str = "moe_intermediate_size"
    shared_width: str | None = None
    prefix: str = "mlp"
    router: str = "gate"
    each: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    stacked: tuple[str, str] | None = None
    transposed: bool = False
    biased: bool = False
    shared: str = "shared_experts"
    shared_gate: str | None = None
    correction: str | None = None
    may_normalize: bool = True
    group_best: int = 1

    @property
    def stacked_weights(self) -> tuple[str, ...]:
        """`stacked` as in the files, within the mixture."""
        names = self.stacked or ()
        return names if self.transposed else tuple(f"{name}.weight" for name in names)


@dataclass(frozen=True)
class Architecture:
    """See the file's head.

    Attributes:
        proof: the case of `tests/model/test_against_transformers.py` that covers it.
        defaults: what a config.json means that leaves a key out.
        bias: field of config.json that gives q, k and v a bias; or whether they always have one.
        output_bias: whether that field also gives the output projection one.
        qk_norm: "head" for norms of each query and key head, "row" for norms over all of them.
        qk_norm_field: field of config.json that turns these on; None: always on.
        norm_offset: added to the weights of norms.
        fused: of "qkv_proj" and "gate_up_proj", those that are one weight in the files.
        interleaved: rope rotates neighbours, not halves.
        scales_embedding: embeddings are multiplied by the root of the hidden size.
        gelu_is_tanh: hidden_act "gelu" means its approximation, as in first releases.
        windows: which layers have the window of sliding_window: "all"; "typed": those that
            layer_types or sliding_window_pattern say; "late": else those from max_window_layers
            on; "": none, whatever config.json says.
        text_type: model_type of text_config in a model that takes images, too. Its text alone is
            served, without the weights for images.
        sinks: each layer has a logit for each query head that takes part in the softmax.
    """

    proof: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    norms: Norms = _PRE
    bias: str | bool = "attention_bias"
    output_bias: bool = True
    qk_norm: str = ""
    qk_norm_field: str | None = None
    norm_offset: float = 0.0
    fused: tuple[str, ...] = ()
    interleaved: bool = False
    scales_embedding: bool = False
    gelu_is_tanh: bool = False
    windows: str = ""
    sinks: bool = False
    text_type: str = ""
    mla: bool = False
    mixture: Mixture | None = None


_POST: Final = Norms(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
_SANDWICH: Final = Norms(
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
_SIGMOID: Final = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "norm_topk_prob": True}
_GROUPED: Final = Mixture(
    "n_routed_experts", correction="gate.e_score_correction_bias", group_best=2
)
_MIXTRAL: Final = Mixture(
    "num_local_experts", "intermediate_size", prefix="block_sparse_moe", each=("w1", "w3", "w2")
)

# fmt: off
_GLM: Final = {
    "head_dim": 128, "num_key_value_heads": 2, "attention_bias": True,
    "partial_rotary_factor": 0.5, "rms_norm_eps": 1.5625e-07,
}
_QWEN: Final = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
_GEMMA: Final = {
    "head_dim": 256, "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True,
}
_GEMMA_2: Final = {
    **_GEMMA, "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
_GEMMA_3: Final = Architecture(
    "gemma3",
    {
        **_GEMMA_2, "sliding_window_pattern": 6, "rope_theta": 1e6,
        "rope_local_base_freq": 10000.0, "attn_logit_softcapping": None, "vocab_size": 262208,
        "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 131072,
    },
    _SANDWICH, qk_norm="head", norm_offset=1.0, scales_embedding=True, windows="typed",
)
_MISTRAL: Final = Architecture(
    "mistral-window", {"num_key_value_heads": 8, "sliding_window": 4096}, bias=False, windows="all",
)
ARCHITECTURES: Final[dict[str, Architecture]] = {
    "LlamaForCausalLM": Architecture("llama"),
    "MistralForCausalLM": _MISTRAL,
    "Mistral3ForConditionalGeneration": replace(
        _MISTRAL, proof="mistral-images", text_type="mistral",
    ),
    "Qwen2ForCausalLM": Architecture(
        "qwen2", _QWEN, bias=True, output_bias=False, windows="late",
    ),
    "Qwen3ForCausalLM": Architecture(
        "qwen3", {**_QWEN, "head_dim": 128}, qk_norm="head", windows="late",
    ),
    "Phi3ForCausalLM": Architecture(
        "phi3-window", {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
        bias=False, fused=("qkv_proj", "gate_up_proj"), windows="all",
    ),
    "Olmo2ForCausalLM": Architecture("olmo2", {"rms_norm_eps": 1e-5}, _POST, qk_norm="row"),
    "Olmo3ForCausalLM": Architecture(
        "olmo3",
        {
            "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "rope_local_base_freq": None,
            "sliding_window": 4096, "sliding_window_pattern": 4,
        },
        _POST, qk_norm="row", windows="typed",
    ),
    "SmolLM3ForCausalLM": Architecture(
        "smollm3",
        {
            "rope_theta": 2e6, "no_rope_layer_interval": 4, "tie_word_embeddings": True,
            "use_sliding_window": False,
        },
        windows="typed",
    ),
    "GraniteForCausalLM": Architecture("granite", {"attention_multiplier": 1.0}),
    "GlmForCausalLM": Architecture(
        "glm", _GLM, output_bias=False, fused=("gate_up_proj",), interleaved=True,
    ),
    "Glm4ForCausalLM": Architecture(
        "glm4", _GLM, output_bias=False, fused=("gate_up_proj",), interleaved=True,
        norms=Norms(
            "input_layernorm", "post_self_attn_layernorm",
            "post_attention_layernorm", "post_mlp_layernorm",
        ),
    ),
    "GemmaForCausalLM": Architecture(
        "gemma", _GEMMA, norm_offset=1.0, scales_embedding=True, gelu_is_tanh=True
    ),
    "Gemma2ForCausalLM": Architecture(
        "gemma2",
        {
            **_GEMMA_2, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
            "sliding_window_pattern": 2,
        },
        _SANDWICH, norm_offset=1.0, scales_embedding=True, windows="typed",
    ),
    "Gemma3ForCausalLM": _GEMMA_3,
    "Gemma3ForConditionalGeneration": replace(
        _GEMMA_3, proof="gemma3-images", text_type="gemma3_text",
    ),
    "MixtralForCausalLM": Architecture(
        "mixtral",
        {
            "norm_topk_prob": True, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
        },
        bias=False, mixture=_MIXTRAL, windows="all",
    ),
    "Qwen2MoeForCausalLM": Architecture(
        "qwen2-moe", {**_QWEN, "qkv_bias": True}, bias="qkv_bias", output_bias=False,
        windows="typed",
        mixture=Mixture(
            shared_width="shared_expert_intermediate_size", shared="shared_expert",
            shared_gate="shared_expert_gate",
        ),
    ),
    "Qwen3MoeForCausalLM": Architecture(
        "qwen3-moe", {**_QWEN, "num_key_value_heads": 4}, qk_norm="head", mixture=Mixture(),
        windows="all",
    ),
    "OlmoeForCausalLM": Architecture(
        "olmoe", {"rms_norm_eps": 1e-5}, qk_norm="row", mixture=Mixture(width="intermediate_size"),
    ),
    "GraniteMoeForCausalLM": Architecture(
        "granite-moe", {"norm_topk_prob": True, "attention_multiplier": 1.0},
        mixture=replace(
            _MIXTRAL, router="router.layer", stacked=("input_linear", "output_linear")
        ),
    ),
    "GptOssForCausalLM": Architecture(
        "gpt-oss",
        {
            "norm_topk_prob": True, "attention_bias": True, "head_dim": 64, "rms_norm_eps": 1e-5,
            "rope_theta": 150000.0, "sliding_window": 128, "sliding_window_pattern": 2,
            "swiglu_alpha": 1.702, "swiglu_limit": 7.0,
            "rope_scaling": {
                "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
                "truncate": False, "original_max_position_embeddings": 4096,
            },
        },
        windows="typed", sinks=True,
        mixture=Mixture(
            "num_local_experts", "intermediate_size", router="router", transposed=True,
            stacked=("experts.gate_up_proj", "experts.down_proj"), biased=True,
        ),
    ),
    "Glm4MoeForCausalLM": Architecture(
        "glm4-moe",
        {**_SIGMOID, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5, "use_qk_norm": False},
        output_bias=False, qk_norm="head", qk_norm_field="use_qk_norm", mixture=_GROUPED,
    ),
    "DeepseekV2ForCausalLM": Architecture(
        "deepseek-moe", {"q_lora_rank": 1536}, interleaved=True, mla=True,
        mixture=Mixture("n_routed_experts", may_normalize=False),
    ),
    "DeepseekV3ForCausalLM": Architecture(
        "deepseek-v3",
        {
            **_SIGMOID, "n_group": 8, "topk_group": 4, "q_lora_rank": 1536,
            "routed_scaling_factor": 2.5,
        },
        interleaved=True, mla=True, mixture=_GROUPED,
    ),
}
# fmt: on

# Of architectures that are asked for and not served: the nearest that is, and what it lacks.
REFUSED: Final = {
    "Llama4ForCausalLM": ("LlamaForCausalLM", "attention within chunks of tokens"),
    "Llama4ForConditionalGeneration": ("LlamaForCausalLM", "attention within chunks, and images"),
    "DeepseekV32ForCausalLM": ("DeepseekV3ForCausalLM", "attention to chosen tokens"),
    "Qwen3NextForCausalLM": ("Qwen3MoeForCausalLM", "layers of linear attention"),
    "Cohere2ForCausalLM": ("LlamaForCausalLM", "layer norms and parallel blocks"),
}


def nearest(name: str) -> str:
    """ "lacks ..., the nearest that is served is ..." of an architecture that is not."""
    if name in REFUSED:
        near, lacks = REFUSED[name]
        return f"it needs {lacks}; the nearest that is served is {near}"
    found = difflib.get_close_matches(name, ARCHITECTURES, n=1, cutoff=0)
    return f"its decoder is not declared; the nearest name is {found[0]}"


def served() -> str:
    """All that is served, each with the test that proves it, and what is not, as lines."""
    test = "tests/model/test_against_transformers.py"
    lines = [f"{name:24} {test} -k '[{row.proof}]'" for name, row in ARCHITECTURES.items()]
    told = [f"{name:32} {nearest(name)}" for name in REFUSED]
    return "\n".join([*lines, "", "not served:", *told])
