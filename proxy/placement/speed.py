"""The speed of a server, measured from the counters of its engine's steps."""

from typing import NamedTuple

from proxy.placement.server_load import STREAMS_PER_DOUBLING, ServerLoad

MIN_SECONDS = 1e-7  # lower bound for the time of a token and of a step
MAX_REPORTED = 10**12  # larger numbers in a server's report are not used
_MEMORY_S = 0.5  # measurements of this many seconds weigh as much as all earlier ones
# Ridge penalty on the time per step. With 2, that time stays 0 until steps with
# different numbers of tokens were measured. 1 would be plain least squares.
_LAUNCH_PENALTY = 2.0
# Each health check of an idle server moves the server's time per token towards that of
# the fastest server, by this share of the difference. Otherwise one unusually slow
# measurement could keep all requests away from the server, so that no request would
# ever measure it again.
_DECAY_PER_CHECK = 0.05
# At least this share of the time of steps with prompts counts as spent on the prompts.
_MIN_PROMPT_SECONDS_SHARE = 0.25


class StepTotals(NamedTuple):
    """Counters of an engine since its start.

    Attributes:
        steps: number of steps.
        tokens: tokens in these steps: one per stream and step, and the prompt tokens.
        prompts: prompt tokens among `tokens`.
        seconds: sum of the durations of the steps.
        mixed_steps, mixed_tokens, mixed_seconds: the part of `steps`, `tokens` and
            `seconds` that belongs to steps with prompt tokens.
    """

    steps: float = 0.0
    tokens: float = 0.0
    prompts: float = 0.0
    seconds: float = 0.0
    mixed_steps: float = 0.0
    mixed_tokens: float = 0.0
    mixed_seconds: float = 0.0


class PromptSpeed:
    """A fit of seconds per step with prompts, and per prompt token.

    The method is weighted least squares with a ridge penalty. The term per step stands
    for the minimum duration of a step. Without this term, measurements with short
    prompts would make a server look slow for long prompts.

    Attributes:
        launch_s: seconds per step; 0 until something was measured.
        token_s: seconds per token; 0 until something was measured.
    """

    def __init__(self) -> None:
        self.launch_s = 0.0
        self.token_s = 0.0
        # Weighted sums of the products that the normal equations need.
        self._steps_steps = 0.0
        self._steps_tokens = 0.0
        self._tokens_tokens = 0.0
        self._steps_seconds = 0.0
        self._tokens_seconds = 0.0

    def add(self, steps: float, tokens: float, seconds: float) -> None:
        """Add a measurement: `steps` with `tokens` of prompts took `seconds`."""
        predicted_s = self.launch_s * steps + self.token_s * tokens
        weight = 1.0 / max(min(predicted_s or seconds, seconds), MIN_SECONDS)
        retained = _MEMORY_S / (_MEMORY_S + seconds)
        self._steps_steps = retained * self._steps_steps + weight * steps * steps
        self._steps_tokens = retained * self._steps_tokens + weight * steps * tokens
        self._tokens_tokens = retained * self._tokens_tokens + weight * tokens * tokens
        self._steps_seconds = retained * self._steps_seconds + weight * steps * seconds
        self._tokens_seconds = (
            retained * self._tokens_seconds + weight * tokens * seconds
        )
        launch_s = (
            self._steps_seconds * self._tokens_tokens
            - self._tokens_seconds * self._steps_tokens
        )
        launch_s /= (
            _LAUNCH_PENALTY * self._steps_steps * self._tokens_tokens
            - self._steps_tokens * self._steps_tokens
        )
        self.launch_s = max(launch_s, 0.0)
        token_s = self._tokens_seconds - self.launch_s * self._steps_tokens
        self.token_s = max(token_s / self._tokens_tokens, MIN_SECONDS)


def measure_streams(load: ServerLoad, new: StepTotals) -> None:
    """Update `load.base_step_s` from steps without prompts.

    Args:
        new: the steps since the last report.
    """
    steps = new.steps - new.mixed_steps
    streams = new.tokens - new.mixed_tokens
    seconds = new.seconds - new.mixed_seconds
    if steps < 1 or not streams > 0 or not seconds > 0:
        return
    measured_s = max(seconds / (steps + streams / STREAMS_PER_DOUBLING), MIN_SECONDS)
    # A longer measurement has more weight.
    weight = seconds / (seconds + _MEMORY_S)
    load.base_step_s += (measured_s - load.base_step_s) * weight


def measures_prompts(new: StepTotals) -> bool:
    """Return whether the speed of prompts can be measured from these steps."""
    return new.prompts >= 1 and new.mixed_steps >= 1 and new.mixed_seconds > 0


def measure_prompts(load: ServerLoad, new: StepTotals, speed: PromptSpeed) -> None:
    """Update `load.launch_s` and `load.token_s` from steps with prompts.

    Args:
        new: the steps since the last report.
        speed: the server's fit, to which these steps are added.
    """
    streams = max(new.mixed_tokens - new.prompts, 0.0)
    stream_steps = min(new.mixed_steps, streams) + streams / STREAMS_PER_DOUBLING
    prompts_s = max(
        new.mixed_seconds - stream_steps * load.base_step_s,
        _MIN_PROMPT_SECONDS_SHARE * new.mixed_seconds,
    )
    speed.add(new.mixed_steps, new.prompts, prompts_s)
    load.launch_s = speed.launch_s
    load.token_s = speed.token_s


def decay_to_fastest(load: ServerLoad, fastest_token_s: float) -> None:
    """Move an idle server's time per token towards the fastest server's."""
    excess_s = max(load.token_s - fastest_token_s, 0)
    load.token_s -= excess_s * _DECAY_PER_CHECK
