"""The decoder of all architectures, which differ in the fields of ModelConfig."""

from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

import torch
from torch import Tensor

from attention.base import AttentionBackend
from model.attention_layers import (
    AttentionQueries,
    AttentionSpec,
    HeadAttention,
    LatentAttention,
    Step,
)
from model.config import ModelConfig
from model.files.safetensors_files import read_headers
from model.layers import GatedMLP, Join, RMSNorm, load_norm
from model.mixture.moe import MoELayer
from model.parallel import Parallel
from model.quantization.stored import StoredWeights
from model.rope import Rope, score_mscale
from model.sizes import check_parallelism
from model.vocabulary import Vocabulary
from model.weights import DummySource, Upload, WeightLoader

# Modules that process images. Their weights are not loaded.
_IMAGE_MODULES: Final = ("vision_tower", "multi_modal_projector")


class _Layer(NamedTuple):
    norm: RMSNorm | None
    attention: HeadAttention | LatentAttention
    mlp_norm: RMSNorm | None
    feed_forward: GatedMLP | MoELayer


class CausalLM:
    """One rank's embedding, layers, final norm and head.

    The class is for inference only: the caller must be in torch.inference_mode.
    """

    def __init__(
        self, config: ModelConfig, loader: WeightLoader, parallel: Parallel
    ) -> None:
        self.config = config
        self.parallel = parallel
        head_dim = None if config.mla else config.head_dim
        self._ropes = [
            Rope(rope, dtype=loader.dtype, device=loader.device, head_dim=head_dim)
            for rope in config.ropes
        ]
        self._vocab = Vocabulary(loader, config, parallel)
        self._layers = [
            self._load_layer(loader, index) for index in range(config.num_layers)
        ]
        self._norm = load_norm(loader, "model.norm", config.hidden_size, config)

    @property
    def attention_spec(self) -> AttentionSpec:
        """The properties that this rank's attention backend must have."""
        config = self.config
        query_dim = config.head_dim
        correction = 1.0
        if config.mla:
            query_dim += config.mla.qk_nope_head_dim
            correction = score_mscale(config.rope)
        return AttentionSpec(
            num_q_heads=config.num_heads // self.parallel.size,
            num_kv_heads=len(self.parallel.kv_heads(config.kv_heads_total)),
            scale=(config.score_scale or query_dim**-0.5) * correction,
            layers=tuple(layer.attention.layer_attention for layer in self._layers),
        )

    def _load_layer(self, loader: WeightLoader, index: int) -> _Layer:
        config = self.config
        prefix = f"model.layers.{index}"
        attention_class = LatentAttention if config.mla else HeadAttention
        feed_forward_class = MoELayer if config.is_moe_layer(index) else GatedMLP
        mixture = config.traits.mixture
        block = mixture.prefix if mixture else "mlp"

        def norm(name: str | None) -> RMSNorm | None:
            if name is None:
                return None
            return load_norm(loader, f"{prefix}.{name}", config.hidden_size, config)

        names = config.traits.norms
        attention_norm = norm(names.attention)
        attention_join = Join(norm(names.attention_out), config.residual_scale)
        mlp_norm = norm(names.mlp)
        mlp_join = Join(norm(names.mlp_out), config.residual_scale)
        attention = attention_class(
            loader, config, index, self.parallel, self._ropes, attention_join
        )
        feed_forward = feed_forward_class(
            loader, f"{prefix}.{block}", config, self.parallel, mlp_join
        )
        return _Layer(attention_norm, attention, mlp_norm, feed_forward)

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attention: AttentionBackend,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Runs one step through all layers, writing its KV through `attention`.

        Args:
            token_ids: int64 [T].
            positions: int64 [T], the position of each token in its sequence.
            attention: a backend that is planned for this step.
            rows: int64 [R] with R >= 1, the rows of the T tokens to return; None: all.
                The last layer stores the KV of all rows, and then computes these rows
                only.

        Returns:
            [T, hidden] or [R, hidden], the input of `logits`, equal on every rank.
        """
        queries = self.attention_queries(
            token_ids, positions, attention.applies_rope, rows
        )
        query = next(queries)
        while True:
            try:
                query = queries.send(query.run_on(attention))
            except StopIteration as end:
                hidden: Tensor = end.value
                return hidden

    def attention_queries(
        self,
        token_ids: Tensor,
        positions: Tensor,
        backend_rotates: bool,
        rows: Tensor | None = None,
    ) -> AttentionQueries:
        """Runs `forward` as a generator that leaves attention to its caller.

        The generator yields the query of each layer, receives the output of attention
        by `send`, and returns the hidden states.

        Args:
            backend_rotates: whether the caller's backend applies norms and rotation;
                see `AttentionBackend.applies_rope`.
        """
        hidden = self._vocab.embed(token_ids)
        step = Step(
            tuple(rope.angles(positions) for rope in self._ropes), backend_rotates
        )
        for index, layer in enumerate(self._layers, 1):
            if index == len(self._layers):
                step = step._replace(rows=rows)
            hidden = yield from layer.attention(hidden, layer.norm, step)
            hidden = layer.feed_forward(hidden, layer.mlp_norm)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns the logits of `hidden` [S, hidden], after the final norm.

        Returns:
            float32 [S, vocab], complete on every rank.
        """
        return self.raw_logits(hidden).float()

    def raw_logits(self, hidden: Tensor) -> Tensor:
        """Returns the same as `logits`, but in the data type of the computation.

        This is enough to find the largest logit.
        """
        return self._vocab.logits(hidden, self._norm)


def load_model(
    config: ModelConfig,
    model_dir: str | Path,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    parallel: Parallel | None = None,
    load_format: str = "auto",
    seed: int = 0,
    pack: bool = False,
    on_load: Callable[[str], None] | None = None,
) -> CausalLM:
    """Loads this rank's part of a model.

    Args:
        model_dir: as `hub.resolve_model` returns it; not read when load_format is
            "dummy".
        dtype: the data type of the computation. On the CPU, weights that are stored in
            this data type stay mapped from their file.
        load_format: "auto" reads safetensors; "dummy" makes random weights from their
            names and `seed`.
        pack: whether to copy linear weights into an order that is faster to multiply,
            instead of mapping them. This applies to the CPU in float32 only.
        on_load: called with the name of each weight in the files when it is loaded or
            skipped.

    Raises:
        ModelError: the files do not fit the config, or the number of ranks does not fit
            the model.
    """
    parallel = parallel or Parallel()
    check_parallelism(config, parallel.size, ep=parallel.ep)
    source: StoredWeights | DummySource = DummySource(seed, device, config.quantization)
    if load_format != "dummy":
        upload = Upload(torch.device(device))
        source = StoredWeights(
            read_headers(Path(model_dir)), config.quantization, upload
        )
    loader = WeightLoader(
        source,
        dtype=dtype,
        device=device,
        pack=pack,
        quantization=config.quantization,
        on_load=on_load,
    )
    with torch.inference_mode():
        model = CausalLM(config, loader, parallel)
    drafts = range(config.num_layers, config.num_layers + config.draft_layers)
    loader.ignore(*(f"model.layers.{layer}." for layer in drafts))
    if config.traits.text_type:
        for module in _IMAGE_MODULES:
            loader.ignore(f"{module}.", f"model.{module}.")
    loader.finish()
    return model
