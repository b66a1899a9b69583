"""The supported architectures, each declared by its differences from Llama.

An entry contains the properties that a model's class defines and config.json does not,
such as the places of norms and the names of weights. Default values of missing keys are
in `defaults.py`; `model/config.py` reads config.json.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

from model.architectures.defaults import DEFAULTS


class Norms(NamedTuple):
    """Names of the norms of a layer; None means that there is no such norm.

    The norms `attention` and `mlp` apply to inputs. The norms `attention_out` and
    `mlp_out` apply to outputs, before the residual is added.
    """

    attention: str | None = "input_layernorm"
    attention_out: str | None = None
    mlp: str | None = "post_attention_layernorm"
    mlp_out: str | None = None


_PRE: Final = Norms()


@dataclass(frozen=True)
class Mixture:
    """A mixture of experts: fields of config.json, names of weights, and the routing.

    Attributes:
        count_field: field of config.json with the number of experts.
        width_field: field of config.json with the intermediate size of one expert.
        shared_width_field: field of config.json with the intermediate size of the
            single shared expert. None: there are n_shared_experts shared experts, each
            of the size in `width_field`.
        prefix: prefix of the mixture's weights, within the layer.
        router: name of the router, within the mixture.
        expert_weights: names of the gate, up and down projection of one expert.
        stacked: names of two tensors. The first holds the gate and up projections of
            all experts, the second holds all down projections. None: each expert has
            `expert_weights` of its own.
        transposed: the stacked tensors are [experts, in, out], their gate and up
            columns alternate, and their names do not end in ".weight".
        biased: the router and all projections of the experts have biases.
        shared: prefix of the shared experts, which are stored as one feed-forward
            layer.
        shared_gate: name of a sigmoid gate on the shared experts' output.
        correction_bias: name of a bias that is added to the scores when experts are
            chosen. This bias does not change the weights of the chosen experts.
        may_normalize: whether the class reads norm_topk_prob. If not, a config with
            norm_topk_prob true is refused.
        group_score_experts: the score of a group of experts is the sum of this many of
            its highest scores.
        alternative_count_field: second name of `count_field`, which transformers
            accepts and may write. Empty if there is no second name.
    """

    count_field: str = "num_experts"
    width_field: str = "moe_intermediate_size"
    shared_width_field: str | None = None
    prefix: str = "mlp"
    router: str = "gate"
    expert_weights: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    stacked: tuple[str, str] | None = None
    transposed: bool = False
    biased: bool = False
    shared: str = "shared_experts"
    shared_gate: str | None = None
    correction_bias: str | None = None
    may_normalize: bool = True
    group_score_experts: int = 1
    alternative_count_field: str = ""

    @property
    def stacked_weights(self) -> tuple[str, ...]:
        """The names of the `stacked` tensors in the files, relative to `prefix`. They
        end in ".weight" unless `transposed`."""
        names = self.stacked or ()
        return names if self.transposed else tuple(f"{name}.weight" for name in names)


@dataclass(frozen=True)
class Architecture:
    """The properties of a model class that config.json does not contain.

    Attributes:
        test_case: the case of `tests/model/test_against_transformers.py` that covers
            the architecture.
        defaults: the keys of config.json that the class reads, with their default
            values.
        fixed_values: values that the class has regardless of config.json.
        norms: the names of the norms of a layer.
        bias: name of the field of config.json that is true if q, k and v have a bias.
            True or False: the bias is the same in all models of the class.
        output_bias: whether the output projection has a bias if q, k and v have one.
        qk_norm: "head" for a norm of each query and key head, "row" for a norm over all
            heads, "" for none.
        qk_norm_field: field of config.json that turns `qk_norm` on; None: always on.
        norm_offset: number that is added to the weights of norms.
        fused: which of the projections "qkv_proj" and "gate_up_proj" are stored as one
            weight in the files.
        interleaved: rope rotates neighboring elements instead of halves.
        scales_embedding: embeddings are multiplied by the square root of the hidden
            size.
        gelu_is_tanh: hidden_act "gelu" means the tanh approximation, as in the first
            releases of the model.
        window_rule: which layers have a sliding window if layer_types is missing.
            "all": all layers, even if layer_types is present.
            "late": the layers from max_window_layers on.
            "alternate": every second layer before max_window_layers.
            "unrotated": the layers without rotary embeddings.
            "typed": all layers except every n-th, where n is sliding_window_pattern.
            "": the class has no sliding windows.
        ropes_by_kind: each kind of layer in layer_types has a rope of its own.
        rotates_part: partial_rotary_factor applies to every rope type.
        rope_aliases: the rope types that the class accepts, each with the implemented
            type that it stands for. None: all implemented types are accepted.
        sinks: each layer has one attention sink logit for each query head, which takes
            part in the softmax.
        text_type: model_type of text_config in a model that also accepts images. Baton
            serves only its text part, without the image weights.
        mla: the class has multi-head latent attention.
        mixture: the mixture of experts, or None if all layers are dense.
    """

    test_case: str
    defaults: Mapping[str, Any]
    fixed_values: Mapping[str, Any] = field(default_factory=dict)
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
    window_rule: str = ""
    ropes_by_kind: bool = False
    rotates_part: bool = False
    rope_aliases: Mapping[str, str] | None = None
    sinks: bool = False
    text_type: str = ""
    mla: bool = False
    mixture: Mixture | None = None


_POST: Final = Norms(
    None, "post_attention_layernorm", None, "post_feedforward_layernorm"
)
_SANDWICH: Final = Norms(
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
_GROUPED: Final = Mixture(
    "n_routed_experts",
    correction_bias="gate.e_score_correction_bias",
    group_score_experts=2,
    alternative_count_field="num_local_experts",
)
_MIXTRAL: Final = Mixture(
    "num_local_experts",
    "intermediate_size",
    prefix="block_sparse_moe",
    expert_weights=("w1", "w3", "w2"),
    alternative_count_field="num_experts",
)

_GEMMA_3: Final = Architecture(
    "gemma3",
    DEFAULTS["gemma3_text"],
    norms=_SANDWICH,
    qk_norm="head",
    norm_offset=1.0,
    scales_embedding=True,
    window_rule="typed",
    ropes_by_kind=True,
)
_MISTRAL: Final = Architecture(
    "mistral-window", DEFAULTS["mistral"], bias=False, window_rule="all"
)
_GLM: Final = Architecture(
    "glm",
    DEFAULTS["glm"],
    output_bias=False,
    fused=("gate_up_proj",),
    interleaved=True,
    rotates_part=True,
)
ARCHITECTURES: Final[dict[str, Architecture]] = {
    "LlamaForCausalLM": Architecture("llama", DEFAULTS["llama"]),
    "MistralForCausalLM": _MISTRAL,
    "Mistral3ForConditionalGeneration": replace(
        _MISTRAL,
        test_case="mistral-images",
        text_type="mistral",
    ),
    "Qwen2ForCausalLM": Architecture(
        "qwen2",
        DEFAULTS["qwen2"],
        bias=True,
        output_bias=False,
        window_rule="late",
    ),
    "Qwen3ForCausalLM": Architecture(
        "qwen3", DEFAULTS["qwen3"], qk_norm="head", window_rule="late"
    ),
    "Phi3ForCausalLM": Architecture(
        "phi3-window",
        DEFAULTS["phi3"],
        bias=False,
        fused=("qkv_proj", "gate_up_proj"),
        window_rule="all",
        rotates_part=True,
        rope_aliases={
            "default": "default",
            "longrope": "longrope",
            "su": "longrope",
            "yarn": "longrope",
        },
    ),
    "Olmo2ForCausalLM": Architecture(
        "olmo2", DEFAULTS["olmo2"], norms=_POST, qk_norm="row"
    ),
    "Olmo3ForCausalLM": Architecture(
        "olmo3",
        DEFAULTS["olmo3"],
        fixed_values={"sliding_window_pattern": 4},
        norms=_POST,
        qk_norm="row",
        window_rule="typed",
        ropes_by_kind=True,
    ),
    "SmolLM3ForCausalLM": Architecture(
        "smollm3", DEFAULTS["smollm3"], window_rule="unrotated"
    ),
    "GraniteForCausalLM": Architecture("granite", DEFAULTS["granite"]),
    "GlmForCausalLM": _GLM,
    "Glm4ForCausalLM": replace(
        _GLM,
        test_case="glm4",
        defaults=DEFAULTS["glm4"],
        norms=Norms(
            "input_layernorm",
            "post_self_attn_layernorm",
            "post_attention_layernorm",
            "post_mlp_layernorm",
        ),
    ),
    "GemmaForCausalLM": Architecture(
        "gemma",
        DEFAULTS["gemma"],
        norm_offset=1.0,
        scales_embedding=True,
        gelu_is_tanh=True,
    ),
    "Gemma2ForCausalLM": Architecture(
        "gemma2",
        DEFAULTS["gemma2"],
        fixed_values={"sliding_window_pattern": 2},
        norms=_SANDWICH,
        norm_offset=1.0,
        scales_embedding=True,
        window_rule="typed",
    ),
    "Gemma3ForCausalLM": _GEMMA_3,
    "Gemma3ForConditionalGeneration": replace(
        _GEMMA_3,
        test_case="gemma3-images",
        text_type="gemma3_text",
    ),
    "MixtralForCausalLM": Architecture(
        "mixtral",
        DEFAULTS["mixtral"],
        fixed_values={"norm_topk_prob": True},
        bias=False,
        mixture=_MIXTRAL,
        window_rule="all",
    ),
    "Qwen2MoeForCausalLM": Architecture(
        "qwen2-moe",
        DEFAULTS["qwen2_moe"],
        bias="qkv_bias",
        output_bias=False,
        window_rule="alternate",
        mixture=Mixture(
            shared_width_field="shared_expert_intermediate_size",
            shared="shared_expert",
            shared_gate="shared_expert_gate",
        ),
    ),
    "Qwen3MoeForCausalLM": Architecture(
        "qwen3-moe",
        DEFAULTS["qwen3_moe"],
        qk_norm="head",
        window_rule="all",
        mixture=Mixture(alternative_count_field="num_local_experts"),
    ),
    "OlmoeForCausalLM": Architecture(
        "olmoe",
        DEFAULTS["olmoe"],
        qk_norm="row",
        mixture=Mixture(
            width_field="intermediate_size", alternative_count_field="num_local_experts"
        ),
    ),
    "GraniteMoeForCausalLM": Architecture(
        "granite-moe",
        DEFAULTS["granitemoe"],
        fixed_values={"norm_topk_prob": True},
        mixture=replace(
            _MIXTRAL,
            router="router.layer",
            stacked=("input_linear", "output_linear"),
            alternative_count_field="",
        ),
    ),
    "GptOssForCausalLM": Architecture(
        "gpt-oss",
        DEFAULTS["gpt_oss"],
        window_rule="typed",
        sinks=True,
        fixed_values={
            "norm_topk_prob": True,
            "sliding_window_pattern": 2,
            "hidden_act": "silu",
        },
        mixture=Mixture(
            "num_local_experts",
            "intermediate_size",
            router="router",
            transposed=True,
            stacked=("experts.gate_up_proj", "experts.down_proj"),
            biased=True,
            alternative_count_field="num_experts",
        ),
    ),
    "Glm4MoeForCausalLM": Architecture(
        "glm4-moe",
        DEFAULTS["glm4_moe"],
        output_bias=False,
        qk_norm="head",
        qk_norm_field="use_qk_norm",
        rotates_part=True,
        mixture=_GROUPED,
    ),
    "DeepseekV2ForCausalLM": Architecture(
        "deepseek-moe",
        DEFAULTS["deepseek_v2"],
        interleaved=True,
        mla=True,
        mixture=Mixture(
            "n_routed_experts",
            may_normalize=False,
            alternative_count_field="num_experts",
        ),
    ),
    "DeepseekV3ForCausalLM": Architecture(
        "deepseek-v3",
        DEFAULTS["deepseek_v3"],
        interleaved=True,
        mla=True,
        mixture=_GROUPED,
    ),
}

# Architectures that users request and Baton does not serve, each with the nearest
# architecture that Baton serves, and with the missing features.
UNSUPPORTED_ARCHITECTURES: Final = {
    "Llama4ForCausalLM": ("LlamaForCausalLM", "attention within chunks of tokens"),
    "Llama4ForConditionalGeneration": (
        "LlamaForCausalLM",
        "attention within chunks, and images",
    ),
    "DeepseekV32ForCausalLM": ("DeepseekV3ForCausalLM", "attention to chosen tokens"),
    "Qwen3NextForCausalLM": ("Qwen3MoeForCausalLM", "layers of linear attention"),
    "Cohere2ForCausalLM": ("LlamaForCausalLM", "layer norms and parallel blocks"),
}


def explain_unsupported(name: str) -> str:
    """Returns why an architecture is not served, with the name of a similar
    architecture that is served."""
    if name in UNSUPPORTED_ARCHITECTURES:
        nearest, missing_feature = UNSUPPORTED_ARCHITECTURES[name]
        return f"it needs {missing_feature}; the nearest that is served is {nearest}"
    matches = difflib.get_close_matches(name, ARCHITECTURES, n=1, cutoff=0)
    return f"its decoder is not declared; the nearest name is {matches[0]}"


def list_architectures() -> str:
    """Returns the text of `baton models`, with one architecture per line.

    A supported architecture is listed with the test that covers it. An unsupported one
    is listed with the reason.
    """
    test = "tests/model/test_against_transformers.py"
    supported = [
        f"{name:24} {test} -k '[{architecture.test_case}]'"
        for name, architecture in ARCHITECTURES.items()
    ]
    unsupported = [
        f"{name:32} {explain_unsupported(name)}" for name in UNSUPPORTED_ARCHITECTURES
    ]
    return "\n".join([*supported, "", "not served:", *unsupported])
