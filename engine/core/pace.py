"""How many tokens of prompts a step may have beside streams, learnt from the times of steps.

What a step takes is taken to be a sum: what each step has, and what each stream, each token of KV
that it reads and each token of a prompt add. Its terms follow what is measured (a Kalman filter),
and a single step that took far too long changes them little. A step with any prompt has a least
time, as it is launched kernel by kernel. So only prompts about as long as those that are asked for
teach what a token takes: for them the sum is right.
"""

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

_UNITS: Final[npt.NDArray[np.float64]] = np.array(
    [1.0, 64.0, 65536.0, 1024.0]
)  # of the terms
_GUESS_S: Final = np.array([4e-3, 1e-3, 2e-3, 25e-3])  # until something was measured
_LEAST_S: Final = np.array([1e-5, 0.0, 0.0, 1e-3])
_DOUBT_S: Final = 0.1  # of each guess
_MOST_DOUBT: Final = len(_UNITS) * _DOUBT_S**2
_NOISE: Final = 0.1  # of a step, as a share of it
_DRIFT: Final = 2e-2  # of the terms from step to step, likewise
_SURPRISE: Final = 0.3  # the most that is believed of a step, likewise
_ENOUGH: Final = 0.75  # of the tokens asked for, to learn from
_LEAST_SHARE: Final = 0.25  # of what streams take that prompts get in any case
_LEAST_TOKENS: Final = 16


class Load(NamedTuple):
    """What one step does: streams, the tokens of KV that it reads, and tokens of prompts."""

    streams: int
    held: int
    prompts: int


class Pace:
    """
    Args:
        target_s: what a step with streams may take.
        most_tokens: of a step.
    """

    def __init__(self, target_s: float, most_tokens: int) -> None:
        self._target_s, self._most_tokens = target_s, most_tokens
        self._terms = _GUESS_S.copy()
        self._doubt = np.eye(len(_UNITS)) * _DOUBT_S**2

    def measured(self, load: Load, seconds: float) -> None:
        """What a step took."""
        if 0 < load.prompts < _ENOUGH * self.prompt_tokens(load.streams, load.held):
            return
        expected = self.seconds(load)
        sizes = _sizes(load)
        if self._doubt.trace() < _MOST_DOUBT:  # what is not seen gets doubtful, no more
            self._doubt += np.eye(len(sizes)) * (_DRIFT * expected) ** 2
        gain = self._doubt @ sizes
        scale = sizes @ gain + (_NOISE * expected) ** 2
        most = _SURPRISE * expected
        self._terms += gain / scale * np.clip(seconds - expected, -most, most)
        np.maximum(self._terms, _LEAST_S, out=self._terms)
        self._doubt -= np.outer(gain, gain) / scale

    def seconds(self, load: Load) -> float:
        """What a step is expected to take."""
        return float(self._terms @ _sizes(load))

    def prompt_tokens(self, streams: int, held: int) -> int:
        """Tokens of prompts beside these streams; some in any case, so that prompts end."""
        streams_s = self.seconds(Load(streams, held, 0))
        room_s = max(self._target_s - streams_s, _LEAST_SHARE * streams_s)
        room = max(int(room_s * _UNITS[-1] / self._terms[-1]), _LEAST_TOKENS)
        return min(room, self._most_tokens)


def _sizes(load: Load) -> npt.NDArray[np.float64]:
    return np.array([1.0, load.streams, load.held, load.prompts], np.float64) / _UNITS
