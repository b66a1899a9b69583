"""The architectures that are served, each by its differences from Llama.

A row holds what a model's class says and its config.json does not: where norms stand, how weights
are named; what a missing key means is in `defaults.py`. config.json is read by `model/config.py`.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

from model.architectures.defaults import DEFAULTS


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
        other_count: another name of `count`, which transformers reads and perhaps writes.
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
    other_count: str = ""

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
        defaults: the keys that the class reads, with what a missing one means.
        fixed: values that the class has whatever config.json says.
        bias: field of config.json that gives q, k and v a bias; or whether they always have one.
        output_bias: whether that field also gives the output projection one.
        qk_norm: "head" for norms of each query and key head, "row" for norms over all of them.
        qk_norm_field: field of config.json that turns these on; None: always on.
        norm_offset: added to the weights of norms.
        fused: of "qkv_proj" and "gate_up_proj", those that are one weight in the files.
        interleaved: rope rotates neighbours, not halves.
        scales_embedding: embeddings are multiplied by the root of the hidden size.
        gelu_is_tanh: hidden_act "gelu" means its approximation, as in first releases.
        windows: which layers have the window of sliding_window, where layer_types does not say:
            "all", even where it does; "late": those from max_window_layers on; "alternate":
            every second one before max_window_layers; "unrotated": those that are not rotated;
            "typed": all but every nth, which sliding_window_pattern gives; "": none, ever.
        ropes_by_kind: each kind of layer in layer_types has a rope of its own.
        rotates_part: partial_rotary_factor counts for every rope type.
        rope_aliases: the rope types that the class takes, with what each means; None: those that
            are served, each meaning itself.
        text_type: model_type of text_config in a model that takes images, too. Its text alone is
            served, without the weights for images.
        sinks: each layer has a logit for each query head that takes part in the softmax.
    """

    proof: str
    defaults: Mapping[str, Any]
    fixed: Mapping[str, Any] = field(default_factory=dict)
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
    correction="gate.e_score_correction_bias",
    group_best=2,
    other_count="num_local_experts",
)
_MIXTRAL: Final = Mixture(
    "num_local_experts",
    "intermediate_size",
    prefix="block_sparse_moe",
    each=("w1", "w3", "w2"),
    other_count="num_experts",
)

# fmt: off
_GEMMA_3: Final = Architecture(
    "gemma3", DEFAULTS["gemma3_text"], norms=_SANDWICH, qk_norm="head", norm_offset=1.0,
    scales_embedding=True, windows="typed", ropes_by_kind=True,
)
_MISTRAL: Final = Architecture("mistral-window", DEFAULTS["mistral"], bias=False, windows="all")
_GLM: Final = Architecture(
    "glm", DEFAULTS["glm"], output_bias=False, fused=("gate_up_proj",), interleaved=True,
    rotates_part=True,
)
ARCHITECTURES: Final[dict[str, Architecture]] = {
    "LlamaForCausalLM": Architecture("llama", DEFAULTS["llama"]),
    "MistralForCausalLM": _MISTRAL,
    "Mistral3ForConditionalGeneration": replace(
        _MISTRAL, proof="mistral-images", text_type="mistral",
    ),
    "Qwen2ForCausalLM": Architecture(
        "qwen2", DEFAULTS["qwen2"], bias=True, output_bias=False, windows="late",
    ),
    "Qwen3ForCausalLM": Architecture("qwen3", DEFAULTS["qwen3"], qk_norm="head", windows="late"),
    "Phi3ForCausalLM": Architecture(
        "phi3-window", DEFAULTS["phi3"], bias=False, fused=("qkv_proj", "gate_up_proj"),
        windows="all", rotates_part=True,
        rope_aliases={
            "default": "default", "longrope": "longrope", "su": "longrope", "yarn": "longrope",
        },
    ),
    "Olmo2ForCausalLM": Architecture("olmo2", DEFAULTS["olmo2"], norms=_POST, qk_norm="row"),
    "Olmo3ForCausalLM": Architecture(
        "olmo3", DEFAULTS["olmo3"], fixed={"sliding_window_pattern": 4}, norms=_POST,
        qk_norm="row", windows="typed", ropes_by_kind=True,
    ),
    "SmolLM3ForCausalLM": Architecture("smollm3", DEFAULTS["smollm3"], windows="unrotated"),
    "GraniteForCausalLM": Architecture("granite", DEFAULTS["granite"]),
    "GlmForCausalLM": _GLM,
    "Glm4ForCausalLM": replace(
        _GLM, proof="glm4", defaults=DEFAULTS["glm4"],
        norms=Norms(
            "input_layernorm", "post_self_attn_layernorm",
            "post_attention_layernorm", "post_mlp_layernorm",
        ),
    ),
    "GemmaForCausalLM": Architecture(
        "gemma", DEFAULTS["gemma"], norm_offset=1.0, scales_embedding=True, gelu_is_tanh=True,
    ),
    "Gemma2ForCausalLM": Architecture(
        "gemma2", DEFAULTS["gemma2"], fixed={"sliding_window_pattern": 2}, norms=_SANDWICH,
        norm_offset=1.0, scales_embedding=True, windows="typed",
    ),
    "Gemma3ForCausalLM": _GEMMA_3,
    "Gemma3ForConditionalGeneration": replace(
        _GEMMA_3, proof="gemma3-images", text_type="gemma3_text",
    ),
    "MixtralForCausalLM": Architecture(
        "mixtral", DEFAULTS["mixtral"], fixed={"norm_topk_prob": True}, bias=False,
        mixture=_MIXTRAL, windows="all",
    ),
    "Qwen2MoeForCausalLM": Architecture(
        "qwen2-moe", DEFAULTS["qwen2_moe"], bias="qkv_bias", output_bias=False,
        windows="alternate",
        mixture=Mixture(
            shared_width="shared_expert_intermediate_size", shared="shared_expert",
            shared_gate="shared_expert_gate",
        ),
    ),
    "Qwen3MoeForCausalLM": Architecture(
        "qwen3-moe", DEFAULTS["qwen3_moe"], qk_norm="head", windows="all",
        mixture=Mixture(other_count="num_local_experts"),
    ),
    "OlmoeForCausalLM": Architecture(
        "olmoe", DEFAULTS["olmoe"], qk_norm="row",
        mixture=Mixture(width="intermediate_size", other_count="num_local_experts"),
    ),
    "GraniteMoeForCausalLM": Architecture(
        "granite-moe", DEFAULTS["granitemoe"], fixed={"norm_topk_prob": True},
        mixture=replace(
            _MIXTRAL, router="router.layer", stacked=("input_linear", "output_linear"),
            other_count="",
        ),
    ),
    "GptOssForCausalLM": Architecture(
        "gpt-oss", DEFAULTS["gpt_oss"], windows="typed", sinks=True,
        fixed={"norm_topk_prob": True, "sliding_window_pattern": 2, "hidden_act": "silu"},
        mixture=Mixture(
            "num_local_experts", "intermediate_size", router="router", transposed=True,
            stacked=("experts.gate_up_proj", "experts.down_proj"), biased=True,
            other_count="num_experts",
        ),
    ),
    "Glm4MoeForCausalLM": Architecture(
        "glm4-moe", DEFAULTS["glm4_moe"], output_bias=False, qk_norm="head",
        qk_norm_field="use_qk_norm", rotates_part=True, mixture=_GROUPED,
    ),
    "DeepseekV2ForCausalLM": Architecture(
        "deepseek-moe", DEFAULTS["deepseek_v2"], interleaved=True, mla=True,
        mixture=Mixture("n_routed_experts", may_normalize=False, other_count="num_experts"),
    ),
    "DeepseekV3ForCausalLM": Architecture(
        "deepseek-v3", DEFAULTS["deepseek_v3"], interleaved=True, mla=True, mixture=_GROUPED,
    ),
}
# fmt: on

# Of architectures that are asked for and not served: the nearest that is, and what it lacks.
REFUSED: Final = {
    "Llama4ForCausalLM": ("LlamaForCausalLM", "attention within chunks of tokens"),
    "Llama4ForConditionalGeneration": (
        "LlamaForCausalLM",
        "attention within chunks, and images",
    ),
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
    lines = [
        f"{name:24} {test} -k '[{row.proof}]'" for name, row in ARCHITECTURES.items()
    ]
    told = [f"{name:32} {nearest(name)}" for name in REFUSED]
    return "\n".join([*lines, "", "not served:", *told])
