"""The decoder of all architectures; ModelConfig describes their differences."""

from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple, Protocol

import torch
from torch import Tensor

from attention.base import AttentionBackend
from model.attention_layers import AttentionQueries, AttentionSpec, Step
from model.config import ModelConfig
from model.decoder_layer import DecoderLayer, attention_spec, load_ropes, run_queries
from model.files.safetensors_files import read_headers
from model.layers import load_norm
from model.parallel import Parallel
from model.sizes import check_parallelism
from model.vocabulary import load_vocabulary
from model.weights import WeightLoader

# Modules that process images. Their weights are not loaded.
_IMAGE_MODULES: Final = ("vision_tower", "multi_modal_projector")


class StateCapture(NamedTuple):
    """The buffer in which a step stores hidden states for a drafter.

    Attributes:
        layers: the states to store: 0 stands for the embeddings, and n for the states
            after the first n layers, before any norm.
        out: [T, len(layers) * hidden], filled by the step. A row holds the states of a
            token in the order of `layers`.
    """

    layers: tuple[int, ...]
    out: Tensor

    def first_rows(self, num_tokens: int) -> "StateCapture":
        """Returns the part of the buffer for a step of `num_tokens` tokens."""
        return self._replace(out=self.out[:num_tokens])

    def store(self, num_layers: int, hidden: Tensor) -> None:
        """Copies `hidden` [T, hidden] to `out` if `num_layers` is one of `layers`."""
        width = hidden.shape[1]
        for index, layer in enumerate(self.layers):
            if layer == num_layers:
                self.out[:, index * width : (index + 1) * width].copy_(hidden)


class StepModel(Protocol):
    """The interface of models that run steps: CausalLM, and adapters of drafters.

    CausalLM documents the methods.
    """

    @property
    def parallel(self) -> Parallel: ...

    @property
    def attention_spec(self) -> AttentionSpec: ...

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attention: AttentionBackend,
        rows: Tensor | None = None,
        capture: StateCapture | None = None,
    ) -> Tensor: ...

    def attention_queries(
        self,
        token_ids: Tensor,
        positions: Tensor,
        backend_rotates: bool,
        rows: Tensor | None = None,
        capture: StateCapture | None = None,
    ) -> AttentionQueries: ...

    def new_capture(
        self, layers: tuple[int, ...], num_tokens: int
    ) -> StateCapture | None: ...

    def logits(self, hidden: Tensor) -> Tensor: ...

    def raw_logits(self, hidden: Tensor) -> Tensor: ...


class CausalLM:
    """One rank's embedding, layers, final norm and head.

    The class is for inference only: the caller must be in torch.inference_mode.
    """

    def __init__(
        self, config: ModelConfig, loader: WeightLoader, parallel: Parallel
    ) -> None:
        self.config = config
        self.parallel = parallel
        self._ropes = load_ropes(loader, config)
        self.embedding, self.head = load_vocabulary(loader, config, parallel)
        self._layers = [
            DecoderLayer(
                loader,
                config,
                index,
                parallel,
                self._ropes,
                prefix=f"model.layers.{index}",
            )
            for index in range(config.num_layers)
        ]
        self.norm = load_norm(loader, "model.norm", config.hidden_size, config)

    @property
    def attention_spec(self) -> AttentionSpec:
        """The properties that this rank's attention backend must have."""
        return attention_spec(self.config, self.parallel, self._layers)

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attention: AttentionBackend,
        rows: Tensor | None = None,
        capture: StateCapture | None = None,
    ) -> Tensor:
        """Runs one step through all layers, writing its KV through `attention`.

        Args:
            token_ids: int64 [T].
            positions: int64 [T], the position of each token in its sequence.
            attention: a backend that is planned for this step.
            rows: int64 [R] with R >= 1, the rows of the T tokens to return; None: all.
                The last layer stores the KV of all rows. After that, it computes only
                the selected rows, or all rows if `capture` needs the last layer.
            capture: where to store the hidden states that a drafter needs.

        Returns:
            [T, hidden] or [R, hidden], the input of `logits`, equal on every rank.
        """
        queries = self.attention_queries(
            token_ids, positions, attention.applies_rope, rows, capture
        )
        return run_queries(queries, attention)

    def attention_queries(
        self,
        token_ids: Tensor,
        positions: Tensor,
        backend_rotates: bool,
        rows: Tensor | None = None,
        capture: StateCapture | None = None,
    ) -> AttentionQueries:
        """Runs `forward` as a generator that leaves attention to its caller.

        The generator yields the query of each layer, receives the output of attention
        by `send`, and returns the hidden states.

        Args:
            backend_rotates: whether the caller's backend applies norms and rotation;
                see `AttentionBackend.applies_rope`.
        """
        hidden = self.embedding(token_ids)
        step = Step(
            tuple(rope.angles(positions) for rope in self._ropes), backend_rotates
        )
        num_layers = len(self._layers)
        # Whether the last layer must compute all rows, because a drafter needs them.
        selects_late = (
            rows is not None and capture is not None and num_layers in capture.layers
        )
        if capture is not None:
            capture.store(0, hidden)
        for index, layer in enumerate(self._layers, 1):
            if index == num_layers and not selects_late:
                step = step._replace(rows=rows)
            hidden = yield from layer(hidden, step)
            if capture is not None:
                capture.store(index, hidden)
        return hidden[rows] if selects_late else hidden

    def new_capture(
        self, layers: tuple[int, ...], num_tokens: int
    ) -> StateCapture | None:
        """Returns a buffer for the states of `num_tokens` tokens; None if there are no
        layers to capture."""
        if not layers:
            return None
        width = len(layers) * self.config.hidden_size
        return StateCapture(layers, self.embedding.weight.new_empty(num_tokens, width))

    def logits(self, hidden: Tensor) -> Tensor:
        """Applies the final norm to `hidden` [S, hidden] and returns the logits.

        Returns:
            float32 [S, vocab], complete on every rank.
        """
        return self.raw_logits(hidden).float()

    def raw_logits(self, hidden: Tensor) -> Tensor:
        """Returns the same as `logits`, but in the data type of the computation.

        This precision is enough to find the largest logit.
        """
        return self.head(hidden, self.norm)


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
    loader = WeightLoader.open(
        None if load_format == "dummy" else read_headers(Path(model_dir)),
        config.quantization,
        dtype=dtype,
        device=device,
        seed=seed,
        pack=pack,
        on_load=on_load,
    )
    with torch.inference_mode():
        model = CausalLM(config, loader, parallel)
    drafts = range(config.num_layers, config.num_layers + config.draft_layers)
    loader.ignore(*(f"model.layers.{layer}." for layer in drafts), "mtp.")
    if config.traits.text_type:
        for module in _IMAGE_MODULES:
            loader.ignore(f"{module}.", f"model.{module}.")
    loader.finish()
    return model
