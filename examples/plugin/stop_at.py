"""Ends a run as soon as the perplexity of a validation is low enough."""

from collections.abc import Mapping
from dataclasses import dataclass

from nmtkit.extend import CALLBACKS, Callback, Config, RunState, option


@dataclass(frozen=True, kw_only=True)
class StopAtConfig(Config):
    stop_at_ppl: float = option(5.0, "End the run at a validation with this perplexity or less.", min=1)


@CALLBACKS.register("stop_at", StopAtConfig())
class StopAt(Callback):
    def __init__(self, config: StopAtConfig) -> None:
        self.ppl = config.stop_at_ppl
        self.validations = 0

    def validation(self, run: RunState, scores: Mapping[str, float]) -> None:
        self.validations += 1
        if scores["ppl"] <= self.ppl:
            run.stop(f"perplexity {scores['ppl']:.2f} after {self.validations} validations")

    def state(self) -> dict[str, int]:
        return {"validations": self.validations}

    def load_state(self, state: dict[str, int]) -> None:
        self.validations = state["validations"]
