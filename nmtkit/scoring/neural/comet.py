"""COMET: metrics that learnt to predict human judgements from embeddings of an encoder (Rei et al. 2020 and 2022).

Reads the checkpoints of the package unbabel-comet: `hparams.yaml` and `checkpoints/model.ckpt`. The encoder is XLM-R
(Conneau et al. 2020). The embedding of a token is a weighted sum of all layers. Three classes of models exist:

- `regression_metric` (COMET-22): a feed-forward network reads the mean embeddings of translation and reference, and
  the products and absolute differences of translation and reference, and of translation and source.
- `referenceless_regression_metric`: the network reads the same features of translation and source.
- `unified_metric` (CometKiwi-22, UniTE): the translation and the other texts are one input, and the network reads the
  embedding of the first token. With a reference, the score is the mean over three inputs: the translation with the
  source, with the reference, and with both.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nmtkit.models.formats import pickles
from nmtkit.models.formats.reading import ModelSettings, naming, read_json, read_text
from nmtkit.scoring.neural.network import ModelFiles, NeuralMetric, Texts, pretrained
from nmtkit.scoring.neural.tokenization import load_tokenizer
from nmtkit.scoring.segments import TextLines

HPARAMS, CHECKPOINT = "hparams.yaml", "checkpoints/model.ckpt"
CLASSES = ("regression_metric", "referenceless_regression_metric", "unified_metric")
# name of the encoder in hparams.yaml -> beginning of its class names in transformers
ENCODERS = {"XLM-RoBERTa": "XLMRoberta", "XLM-RoBERTa-XL": "XLMRobertaXL"}
# packages of objects that Lightning stores with the weights, such as the state of callbacks; the metric ignores them
PACKAGES = ("pytorch_lightning", "lightning", "lightning_fabric", "torchmetrics", "numpy", "comet")
ROWS = 2048  # number of translations that the feed-forward network scores at a time


def read_hparams(folder: Path) -> ModelSettings:
    """Returns the settings in hparams.yaml."""
    import yaml

    path = folder / HPARAMS
    try:
        values = yaml.safe_load(read_text(path, "a COMET model has this file and checkpoints/model.ckpt"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} does not hold settings")
    return ModelSettings(values, path)


class Comet(NeuralMetric):
    """A COMET model. A score is 100 times the output, so most scores of COMET-22 and CometKiwi-22 are from 0 to 100."""

    scale = 100.0

    def __init__(self, files: ModelFiles, encoder_folder: Path, device: str, *, reads_reference: bool) -> None:
        """`encoder_folder` has the config and the tokenizer of the encoder.

        Raises ValueError for an unknown or damaged checkpoint, and for a model that does not fit
        `reads_reference`.
        """
        super().__init__(files, device)
        self.reads_reference = reads_reference
        path = files.folder / CHECKPOINT
        named = read_hparams(files.folder)
        self.kind = named.one_of("class_identifier", CLASSES)
        contents = pickles.load(path, PACKAGES)
        with naming(path):
            # as in unbabel-comet, hparams.yaml names the class; for other settings, the checkpoint has precedence
            stored = pickles.to_plain(contents.get("hyper_parameters")) or {}
            settings = ModelSettings({**named.values, **stored}, path)
            weights: dict[str, Tensor] = dict(contents["state_dict"])
        self.label = f"{'COMET' if reads_reference else 'CometKiwi'} {files.name.rsplit('/', 1)[-1]}"
        self.segments = settings.value("input_segments", ["mt", "src", "ref"]) if self.kind == CLASSES[2] else []
        if reads_reference and self.kind != CLASSES[0] and "ref" not in self.segments:
            raise ValueError(f"{files.name} reads no reference; give it as cometkiwi={files.name}")
        if not reads_reference and self.kind != CLASSES[1] and "src" not in self.segments:
            raise ValueError(f"{files.name} needs a reference; give it as comet={files.name}")
        # Unified models were trained with softmax, although their checkpoints say sparsemax (issue 195 of COMET).
        # So hparams.yaml of the published models says sparsemax_patch since version 2.2.4 of unbabel-comet.
        mixing = settings.text("layer_transformation", "sparsemax" if self.kind == CLASSES[2] else "softmax")
        self.sparse = mixing == "sparsemax" and named.values.get("layer_transformation") != "sparsemax_patch"
        self.normalized = settings.flag("layer_norm", True)
        layer = settings.value("sent_layer" if self.kind == CLASSES[2] else "layer", "mix")
        self.pool = "cls" if self.kind == CLASSES[2] else settings.one_of("pool", ("avg", "max", "cls"), "avg")
        with naming(path):
            self._load_encoder(settings.one_of("encoder_model", ENCODERS), encoder_folder, weights, path)
            self.mix, self.gamma = self._layer_mix(layer, weights, settings)
            self.head = feed_forward(settings, weights).to(self.device)
        parts = {CLASSES[0]: 6, CLASSES[1]: 4, CLASSES[2]: 1}[self.kind]
        if weights["estimator.ff.0.weight"].shape[1] != parts * self.encoder.config.hidden_size:
            raise ValueError(f"{path}: the feed-forward network does not fit the encoder in {encoder_folder}")

    def _load_encoder(self, name: str, folder: Path, weights: Mapping[str, Tensor], path: Path) -> None:
        import transformers

        config = getattr(transformers, f"{ENCODERS[name]}Config").from_dict(read_json(folder / "config.json"))
        prefix = "encoder.model."
        own = {key.removeprefix(prefix): value for key, value in weights.items() if key.startswith(prefix)}
        architecture = getattr(transformers, f"{ENCODERS[name]}Model")
        self.encoder = pretrained(architecture, config, own, path, add_pooling_layer=False).float().to(self.device)
        self.tokenizer = load_tokenizer(folder, "xlm-roberta", config.vocab_size)
        self.first, self.padding, self.last = map(self.tokenizer.token_to_id, ("<s>", "<pad>", "</s>"))
        self.positions: int = config.max_position_embeddings - 2  # the encoder counts positions from 2

    def _layer_mix(self, layer: Any, weights: Mapping[str, Tensor], settings: ModelSettings) -> tuple[Tensor, Tensor]:
        """Returns the weights of the embeddings and of the layers [1 + layers], and the factor of the sum [1]."""
        layers = self.encoder.config.num_hidden_layers + 1
        if layer == "mix":
            names = [f"layerwise_attention.scalar_parameters.{index}" for index in range(layers)]
            scalars = torch.cat([weights[name] for name in names]).float()
            mix = sparsemax(scalars) if self.sparse else scalars.softmax(0)
            return mix.to(self.device), weights["layerwise_attention.gamma"].float().to(self.device)
        if not isinstance(layer, int) or not 0 <= layer < layers:
            raise settings.wrong("layer", f"mix or a number below {layers}")
        self.normalized = False
        return nn.functional.one_hot(torch.tensor(layer), layers).float().to(self.device), torch.ones(1).to(self.device)

    # --- texts to scores ----------------------------------------------------------------------------------------------

    def outputs(self, columns: Sequence[TextLines]) -> Tensor:
        if self.kind != CLASSES[2]:
            return self._regression(columns)
        orders = [(0, 1), (0, 2), (0, 1, 2)] if self.reads_reference else [(0, 1)]
        if self.reads_reference and "src" not in self.segments:
            orders = [(0, 2)]
        inputs = [text for order in orders for text in zip(*(columns[index] for index in order), strict=True)]
        return self.rows(inputs).view(len(orders), -1).mean(0)

    def _regression(self, columns: Sequence[TextLines]) -> Tensor:
        """Returns the result of `outputs`. Embeds each text alone, and only once if many triples have it."""
        index = {text: row for row, text in enumerate(dict.fromkeys(text for lines in columns for text in lines))}
        embeddings = self.rows([(text,) for text in index]).to(self.device)
        rows = torch.tensor([[index[text] for text in lines] for lines in columns], device=self.device)
        values = []
        with self.computing():
            for part in rows.split(ROWS, 1):
                hypothesis, source, *reference = embeddings[part]
                others = [*reference, source]
                features = [hypothesis, others[0]]
                for other in others:
                    features += [hypothesis * other, (hypothesis - other).abs()]
                values.append(self.head(torch.cat(features, 1))[:, 0])
        return self.finite(torch.cat(values))

    def encode(self, texts: Sequence[Texts]) -> list[list[int]]:
        """Returns the ids of each input: <s> text </s>, or for a unified metric <s> text </s> </s> text </s>.

        An input of a unified metric can also have three texts. Truncates long texts and long inputs.
        """
        limit = self.positions - 2  # maximum tokens of a text, <s> and </s> included
        distinct = list(dict.fromkeys(text for each in texts for text in each))
        encoded = self.tokenizer.encode_batch(distinct, add_special_tokens=False)
        ids = {text: each.ids[: limit - 2] for text, each in zip(distinct, encoded, strict=True)}
        if self.kind != CLASSES[2]:
            return [[self.first, *ids[text], self.last] for (text,) in texts]
        result = []
        for each in texts:
            joined = [self.first]
            for text in each:
                joined += [*(id for id in ids[text] if id != self.padding), self.last, self.last]
            result.append(joined[:-1][: self.positions])
        return result

    def run(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Returns the embedding of each text [texts, D], or the score of each input of a unified metric [inputs, 1]."""
        layers = self.encoder(input_ids=ids, attention_mask=mask, output_hidden_states=True).hidden_states
        real = mask[..., None].float()
        tokens = sum(
            weight * (normalized(layer, real) if self.normalized else layer)
            for weight, layer in zip(self.mix, layers, strict=True)
        )
        tokens = self.gamma * tokens  # [inputs, tokens, D]
        padded = (ids == self.padding)[..., None]
        if self.pool == "max":
            return tokens.masked_fill(padded, -torch.inf).amax(1)
        if self.pool == "avg":
            return tokens.masked_fill(padded, 0.0).sum(1) / real.sum(1)
        return self.head(tokens[:, 0]) if self.kind == CLASSES[2] else tokens[:, 0]


def normalized(layer: Tensor, real: Tensor) -> Tensor:
    """Returns a layer [inputs, tokens, D] with mean 0 and variance 1 over each input. `real` is 0 for padding."""
    count = real.sum(1, keepdim=True) * layer.shape[-1]
    mean = (layer * real).sum((1, 2), keepdim=True) / count
    variance = (((layer * real - mean) * real) ** 2).sum((1, 2), keepdim=True) / count
    return (layer - mean) / (variance + 1e-12).sqrt()


def sparsemax(scores: Tensor) -> Tensor:
    """Returns the probabilities that are nearest to `scores` [layers] (Martins and Astudillo 2016, algorithm 1)."""
    ordered = scores.sort(descending=True).values
    counts = torch.arange(1, len(scores) + 1)
    sums = ordered.cumsum(0) - 1
    support = int((counts * ordered > sums).sum())
    return (scores - sums[support - 1] / support).clamp(min=0)


def feed_forward(settings: ModelSettings, weights: Mapping[str, Tensor]) -> nn.Sequential:
    """Returns the network `estimator.ff`. In the checkpoint, every third module is a linear layer."""

    def activation(name: str) -> nn.Module:
        found = getattr(nn, name.title(), None)
        if found is None:
            raise ValueError(f"{settings.path}: unknown activation {name!r}")
        made: nn.Module = found()
        return made

    modules: list[nn.Module] = []
    names = [settings.text("activations", "Tanh")] * len(settings.value("hidden_sizes", [3072, 1024]))
    for index, name in enumerate([*names, settings.values.get("final_activation")]):
        weight, bias = (weights[f"estimator.ff.{3 * index}.{kind}"].float() for kind in ("weight", "bias"))
        linear = nn.Linear(weight.shape[1], weight.shape[0])
        linear.load_state_dict({"weight": weight, "bias": bias})
        modules += [linear, *([] if name is None else [activation(name)])]
    return nn.Sequential(*modules).eval()
