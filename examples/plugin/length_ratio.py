"""Ratio of the words in translations to the words in references. Below 1, translations are too short."""

from dataclasses import dataclass

from nmtkit.extend import METRICS, Config, Metric, Outputs


@dataclass(frozen=True, kw_only=True)
class LengthRatioConfig(Config):
    """No settings."""


@METRICS.register("length_ratio", LengthRatioConfig())
class LengthRatio(Metric):
    translates = True  # `score` reads translations, unlike metrics that read counts of the loss, such as accuracy

    def __init__(self, config: LengthRatioConfig) -> None:
        pass

    def score(self, outputs: Outputs) -> float:
        words, expected = (
            sum(len(line.split()) for line in lines) for lines in (outputs.hypotheses, outputs.references)
        )
        return words / max(1, expected)
