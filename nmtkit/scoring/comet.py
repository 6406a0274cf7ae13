"""COMET, a learnt metric that reads the source too. It comes with the extra `nmtkit[comet]` and downloads its model."""

from collections.abc import Sequence
from typing import Any

from sacrebleu.metrics.base import Metric, Score, Signature


class Comet(Metric):
    """A corpus scores the mean of its sentences, times 100. Statistics of a sentence: [100 x its score, 1]."""

    def __init__(self, model: str, sources: Sequence[str] | None) -> None:
        """Raises ImportError without the package, ValueError without source sentences."""
        super().__init__()  # type: ignore[no-untyped-call]
        try:
            import comet
        except ImportError:
            raise ImportError("comet is not installed: pip install 'nmtkit[comet]' (it brings a large model)") from None
        if sources is None:
            raise ValueError("COMET reads the source too: give it as --src FILE, or use --data")
        self.model_name = model
        self.sources = sources
        self.model: Any = comet.load_from_checkpoint(comet.download_model(model))

    def _extract_corpus_statistics(
        self, hypotheses: Sequence[str], references: Sequence[Sequence[str]] | None
    ) -> list[list[float]]:
        import torch

        if references is None or len(references) != 1:
            raise ValueError(f"COMET takes one reference, not {len(references or ())}")
        if len(self.sources) != len(hypotheses):
            raise ValueError(f"there are {len(self.sources)} source sentences and {len(hypotheses)} translations")
        self.num_refs = 1
        data = [
            {"src": source, "mt": hypothesis, "ref": reference}
            for source, hypothesis, reference in zip(self.sources, hypotheses, references[0], strict=True)
        ]
        prediction = self.model.predict(data, batch_size=32, gpus=int(torch.cuda.is_available()), progress_bar=False)
        return [[100 * float(value), 1.0] for value in prediction.scores]

    def _aggregate_and_compute(self, stats: list[list[float]]) -> Score:
        return self._compute_score_from_stats([sum(column) for column in zip(*stats, strict=True)])

    def _compute_score_from_stats(self, stats: Sequence[float]) -> Score:
        return Score("COMET", float(stats[0] / stats[1]))

    def get_signature(self) -> Signature:
        from importlib.metadata import version

        signature = Signature(self.__dict__)
        signature.update("model", self.model_name.rsplit("/", 1)[-1])
        signature.update("scale", 100)
        signature.update("version", version("unbabel-comet"))
        return signature

    # What sacreBLEU's own machinery would ask of a metric that compares n-grams; COMET reads whole texts at once.
    def _preprocess_segment(self, sent: str) -> str:
        raise NotImplementedError

    def _extract_reference_info(self, refs: Sequence[str]) -> dict[str, Any]:
        raise NotImplementedError

    def _compute_segment_statistics(self, hypothesis: str, ref_kwargs: dict[str, Any]) -> list[Any]:
        raise NotImplementedError
