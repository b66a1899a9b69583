"""The decoder of every architecture: what differs is declared by the config."""

from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

import torch
from torch import Tensor

from attention.base import AttentionBackend
from model.attention_layers import (
    Asking,
    AttentionSpec,
    HeadAttention,
    LatentAttention,
    Step,
)
from model.config import ModelConfig
from model.layers import GatedMLP, Join, RMSNorm, Vocabulary, load_norm
from model.moe import MoELayer
from model.parallel import Parallel
from model.quantization.stored import StoredWeights
from model.rope import Rope, mscale_of_scores
from model.sizes import check_parallelism, read_headers
from model.weights import DummySource, Upload, WeightLoader

_OF_IMAGES: Final = (
    "vision_tower",
    "multi_modal_projector",
)  # weights that text goes without


class _Layer(NamedTuple):
    norm: RMSNorm | None
    attention: HeadAttention | LatentAttention
    mlp_norm: RMSNorm | None
    feed_forward: GatedMLP | MoELayer


class CausalLM:
    """Embedding, layers, final norm and head of one rank. Inference only: the caller is in
    torch.inference_mode."""

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
        config = self.config
        query_dim = config.head_dim + (config.mla.qk_nope_head_dim if config.mla else 0)
        correction = mscale_of_scores(config.rope) if config.mla else 1.0
        return AttentionSpec(
            num_q_heads=config.num_heads // self.parallel.size,
            num_kv_heads=len(self.parallel.kv_heads(config.kv_heads_total)),
            scale=(config.score_scale or query_dim**-0.5) * correction,
            layers=tuple(layer.attention.attends for layer in self._layers),
        )

    def _load_layer(self, loader: WeightLoader, index: int) -> _Layer:
        config, prefix, parallel = self.config, f"model.layers.{index}", self.parallel
        attend = LatentAttention if config.mla else HeadAttention
        feed_forward = MoELayer if config.is_mixed(index) else GatedMLP
        block = config.declared.mixture.prefix if config.declared.mixture else "mlp"
        norm, norm_out, mlp_norm, mlp_norm_out = (
            load_norm(loader, f"{prefix}.{name}", config.hidden_size, config)
            if name
            else None
            for name in config.declared.norms
        )
        joins = [
            Join(after, config.residual_scale) for after in (norm_out, mlp_norm_out)
        ]
        return _Layer(
            norm,
            attend(loader, config, index, parallel, self._ropes, joins[0]),
            mlp_norm,
            feed_forward(loader, f"{prefix}.{block}", config, parallel, joins[1]),
        )

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
            positions: int64 [T], of each token in its sequence.
            attention: planned for this step.
            rows: int64 [R], those of T to return, R >= 1; all where not given. The last layer
                computes no others once their KV is stored.

        Returns:
            [T, hidden] or [R, hidden], as `logits` takes it, equal on every rank.
        """
        asking = self.asking(token_ids, positions, attention.applies_rope, rows)
        query = next(asking)
        while True:
            try:
                query = asking.send(query.answer(attention))
            except StopIteration as end:
                hidden: Tensor = end.value
                return hidden

    def asking(
        self,
        token_ids: Tensor,
        positions: Tensor,
        backend_rotates: bool,
        rows: Tensor | None = None,
    ) -> Asking:
        """`forward`, which leaves attention to who sends the answers."""
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
        """float32 [S, vocab] of hidden [S, hidden], which it norms: on every rank all of it."""
        return self.raw_logits(hidden).float()

    def raw_logits(self, hidden: Tensor) -> Tensor:
        """`logits` as computed, perhaps in 16 bits, which is enough to tell the largest."""
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
        model_dir: as `hub.resolve_model` returns it; not read when load_format is "dummy".
        dtype: to compute in; on the CPU weights of this dtype stay mapped from their file.
        load_format: "auto" reads safetensors, "dummy" makes weights from their names and `seed`.
        pack: on the CPU in float32, keep linear weights in a faster order instead of mapped.
        on_load: told the name of each weight in the files as it is loaded or passed over.

    Raises:
        ModelError: the files do not fit the config, or tp does not fit the model.
    """
    parallel = parallel or Parallel()
    check_parallelism(config, parallel.size, ep=parallel.ep)
    source: StoredWeights | DummySource = DummySource(seed, device)
    if load_format != "dummy":
        upload = Upload(torch.device(device))
        source = StoredWeights(
            read_headers(Path(model_dir)), config.quantization, upload
        )
    loader = WeightLoader(
        source, dtype=dtype, device=device, pack=pack, quantization=config.quantization,
        on_load=on_load,
    )  # fmt: skip
    with torch.inference_mode():
        model = CausalLM(config, loader, parallel)
    drafts = range(config.num_layers, config.num_layers + config.draft_layers)
    loader.ignore(*(f"model.layers.{layer}." for layer in drafts))
    if config.declared.text_type:
        loader.ignore(
            *(f"{prefix}{part}." for prefix in ("", "model.") for part in _OF_IMAGES)
        )
    loader.finish()
    return model
