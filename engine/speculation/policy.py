"""stub"""


class AcceptanceRate:
    value = 0.8

    def record(self, num_proposed: int, num_accepted: int) -> None: ...


class SpeculationPolicy:
    def limits(self, rates, lengths, num_streams):
        return list(lengths)

    def record_step(self, **k): ...
