"""Loads this rank's part of the experts of a layer."""

import operator

import torch
from torch import Tensor

from model.architectures.table import Mixture
from model.config import ModelConfig
from model.errors import ModelLoadError
from model.parallel import Parallel
from model.quantization.quantized import Weight, concatenated, map_weight, stacked
from model.weights import WeightLoader


def load_experts(
    loader: WeightLoader,
    prefix: str,
    config: ModelConfig,
    parallel: Parallel,
    experts: range,
) -> tuple[Weight, Weight, tuple[Tensor, Tensor] | None]:
    """Loads this rank's part of `experts`.

    Ranks that share experts split the width of each expert. Only the first of these
    ranks gets the bias of the output, because the ranks' outputs are summed. Weights of
    all other experts are marked as ignored in `loader`.

    Args:
        prefix: prefix of the names of the layer's mixture of experts.
        experts: indices of the experts that this rank computes.

    Returns:
        The weights gate_up and down, and the biases, as arguments of `Experts`.
    """
    moe = config.moe
    mixture = config.traits.mixture
    assert moe is not None and mixture is not None
    for expert in range(moe.num_experts):
        if expert not in experts:
            loader.ignore(*_names_of_expert(prefix, mixture, expert))
    sharing_ranks = parallel.size // parallel.ep
    share = moe.expert_intermediate_size // sharing_ranks
    start = parallel.rank % sharing_ranks * share
    columns = range(start, start + share)
    reader: _StackedExperts | _SeparateExperts
    biases = None
    if mixture.stacked:
        reader = _StackedExperts(loader, prefix, config, mixture, columns)
        if mixture.biased:
            biases = reader.biases(experts, mixture.stacked)
    else:
        reader = _SeparateExperts(loader, prefix, config, mixture, columns)
    gate_up = stacked(len(experts), map(reader.gate_up, experts))
    down = stacked(len(experts), map(reader.down, experts))
    return gate_up, down, biases


def _names_of_expert(prefix: str, mixture: Mixture, expert: int) -> list[str]:
    """Returns the names of the gate, up and down projection of an expert."""
    return [
        f"{prefix}.experts.{expert}.{name}.weight" for name in mixture.expert_weights
    ]


class _ExpertReader:
    """Reads this rank's part of the experts of a layer.

    Args:
        columns: this rank's part of the intermediate width.
    """

    def __init__(
        self,
        loader: WeightLoader,
        prefix: str,
        config: ModelConfig,
        mixture: Mixture,
        columns: range,
    ) -> None:
        assert config.moe is not None
        self._loader = loader
        self._prefix = prefix
        self._mixture = mixture
        self._hidden = config.hidden_size
        self._width = config.moe.expert_intermediate_size
        self._columns = columns


class _SeparateExperts(_ExpertReader):
    """Reads experts from files in which each expert has its own weights."""

    def gate_up(self, expert: int) -> Weight:
        gate, up, _ = _names_of_expert(self._prefix, self._mixture, expert)
        shape = (self._width, self._hidden)
        parts = [
            self._loader.matrix(name, shape, rows=self._columns) for name in (gate, up)
        ]
        joined = concatenated(parts)
        if joined is None:
            raise ModelLoadError(
                f"the gate and up projections of {self._prefix}.experts are quantised "
                "differently; Baton needs the same quantisation for both"
            )
        return joined

    def down(self, expert: int) -> Weight:
        *_, down = _names_of_expert(self._prefix, self._mixture, expert)
        shape = (self._hidden, self._width)
        return self._loader.matrix(down, shape, cols=self._columns)


class _StackedExperts(_ExpertReader):
    """Reads experts from tensors that hold all experts of a layer."""

    def __init__(
        self,
        loader: WeightLoader,
        prefix: str,
        config: ModelConfig,
        mixture: Mixture,
        columns: range,
    ) -> None:
        super().__init__(loader, prefix, config, mixture, columns)
        assert config.moe is not None
        self._num_experts = config.moe.num_experts
        rows = torch.arange(2 * self._width)
        if mixture.transposed:  # rows of gates and ups alternate
            gates_and_ups = rows.view(self._width, 2).t()
        else:
            gates_and_ups = rows.view(2, self._width)
        # The rows of gate_up that belong to this rank.
        self._gate_up_rows = gates_and_ups[:, columns.start : columns.stop].flatten()

    def gate_up(self, expert: int) -> Weight:
        shape = (2 * self._width, self._hidden)
        weight = self._matrix(self._mixture.stacked_weights[0], shape, expert, None)
        return map_weight(weight, operator.itemgetter(self._gate_up_rows))

    def down(self, expert: int) -> Weight:
        shape = (self._hidden, self._width)
        name = self._mixture.stacked_weights[1]
        return self._matrix(name, shape, expert, self._columns)

    def _matrix(
        self, name: str, shape: tuple[int, int], expert: int, cols: range | None
    ) -> Weight:
        weight = self._loader.matrix(
            f"{self._prefix}.{name}",
            (self._num_experts, *shape),
            rows=range(expert, expert + 1),
            cols=cols,
            transposed=self._mixture.transposed,
        )
        return map_weight(weight, operator.itemgetter(0))

    def biases(self, experts: range, names: tuple[str, str]) -> tuple[Tensor, Tensor]:
        """Returns the biases of gate_up and of down.

        On a rank without the first columns, the bias of down is 0, because the outputs
        of the ranks are summed.
        """
        gate_up_name, down_name = names
        gate_up = self._loader.load(
            f"{self._prefix}.{gate_up_name}_bias",
            (self._num_experts, 2 * self._width),
            rows=experts,
        )[:, self._gate_up_rows]
        down = self._loader.load(
            f"{self._prefix}.{down_name}_bias",
            (self._num_experts, self._hidden),
            rows=experts,
        )
        if self._columns.start > 0:
            down = torch.zeros_like(down)
        return gate_up, down
