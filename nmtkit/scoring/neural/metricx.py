"""MetricX-24: an mT5 model that predicts the error of a translation, from 0 (perfect) to 25 (Juraska et al. 2024).

Follows the code in https://github.com/google-research/metricx at commit fc4978eb064670f7cc33e93ea4f52d38396b8ae6:
`metricx24/predict.py` for the input, and `metricx24/models.py` for the score.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from nmtkit.models.formats.huggingface import read_weights
from nmtkit.models.formats.reading import naming, read_json
from nmtkit.scoring.neural.network import ModelFiles, NeuralMetric, Texts, pretrained
from nmtkit.scoring.neural.tokenization import load_tokenizer
from nmtkit.scoring.segments import TextLines

SCORE_ID = 250_089  # <extra_id_10>: the logit of this piece in the first step of the decoder is the score
MAX_TOKENS = 1536  # maximum tokens of an input, eos included, in the training of the models
HIGHEST = 25.0


class MetricX(NeuralMetric):
    """A MetricX-24 model. Lower scores are better. The model works with and without a reference."""

    worst, best = HIGHEST, 0.0
    padding = 0

    def __init__(self, files: ModelFiles, tokenizer_folder: Path, device: str, *, reads_reference: bool) -> None:
        """Raises ValueError for a damaged checkpoint, and for a model that is not a MetricX model."""
        import transformers

        path = files.folder / "config.json"
        values = read_json(path)
        if values.get("model_type") != "mt5":
            raise ValueError(f"{path}: the model type is {values.get('model_type')!r}, but MetricX has the type 'mt5'")
        weights = read_weights(files.folder)
        with naming(files.folder):
            projection = weights.pop("lm_head.weight")
            if len(projection) <= SCORE_ID:
                raise ValueError(
                    f"{files.folder} has {len(projection)} outputs, but MetricX has {SCORE_ID + 1} or more"
                )
            config = transformers.MT5Config.from_dict(values)
            dtype = torch.bfloat16 if projection.dtype == torch.bfloat16 else torch.float32
            super().__init__(files, device, dtype)
            self.network = pretrained(transformers.MT5Model, config, weights, files.folder).to(self.device, dtype)
            # A model with tied embeddings scales its outputs. `values` says whether embeddings are tied; `config` does
            # not, because recent versions of transformers report every `config` as tied.
            factor = config.d_model**-0.5 if values.get("tie_word_embeddings", False) else 1.0
            self.projection = (projection[SCORE_ID] * factor).to(self.device, dtype)
        self.reads_reference = reads_reference
        self.label = f"MetricX{'' if reads_reference else '-QE'} {files.name.rsplit('/', 1)[-1]}"
        self.tokenizer = load_tokenizer(tokenizer_folder, "mt5", config.vocab_size)

    def outputs(self, columns: Sequence[TextLines]) -> Tensor:
        return self.rows(list(zip(*columns, strict=True)))[:, 0]

    def encode(self, texts: Sequence[Texts]) -> list[list[int]]:
        """Returns the first MAX_TOKENS - 1 ids of each input, without eos.

        An input is "source: … candidate: …", followed by " reference: …" if the metric reads a reference.
        """
        lines = [
            f"source: {source} candidate: {candidate}" + "".join(f" reference: {text}" for text in reference)
            for candidate, source, *reference in texts
        ]
        encoded = self.tokenizer.encode_batch(lines, add_special_tokens=False)
        return [each.ids[: MAX_TOKENS - 1] for each in encoded]

    def run(self, ids: Tensor, mask: Tensor) -> Tensor:
        start = ids.new_zeros(len(ids), 1)
        output = self.network(input_ids=ids, attention_mask=mask, decoder_input_ids=start, use_cache=False)
        score = output.last_hidden_state[:, 0] @ self.projection
        return score.clamp(0, HIGHEST)[:, None]
