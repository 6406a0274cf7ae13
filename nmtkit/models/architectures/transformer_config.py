"""The hyperparameters of the Transformer, and its presets."""

from dataclasses import dataclass, replace
from typing import Literal

from nmtkit.config import Config, option
from nmtkit.models.architectures.interface import probability

# positions that are added to the embeddings, and positions inside self-attention
ADDED_POSITIONS = ("sinusoidal", "sinusoidal_halves", "sinusoidal_fairseq", "learned")
ATTENTION_POSITIONS = ("rotary", "relative", "alibi")


@dataclass(frozen=True, kw_only=True)
class TransformerConfig(Config):
    """The hyperparameters in Table 3 of "Attention Is All You Need", and options from later work."""

    encoder_layers: int = option(
        6,
        "layers of the encoder (N in Table 3); 0: a language model of the target side, without encoder and "
        "cross-attention",
        min=0,
        max=1_000,
    )
    decoder_layers: int = option(6, "layers of the decoder", min=1, max=1_000)
    d_model: int = option(512, "width of every sub-layer's output (section 3.1)", min=1, max=65_536)
    d_ff: int = option(2048, "inner width of the feed-forward networks (section 3.3)", min=1, max=1_048_576)
    heads: int = option(8, "attention heads (section 3.2.2)", min=1, max=65_536)
    d_key: int | None = option(None, "width of one head's queries and keys; none: d_model / heads", min=1, max=65_536)
    d_value: int | None = option(None, "width of one head's values; none: d_model / heads", min=1, max=65_536)
    dropout: float = probability(0.1, "dropout on each sub-layer's output and on the summed embeddings (section 5.4)")
    attention_dropout: float = probability(0.0, "dropout on attention weights")
    activation: Literal["relu", "gelu", "swish", "reglu", "geglu", "swiglu"] = option(
        "relu",
        "activation of the feed-forward networks; the last three are gated by a second projection (Shazeer 2020)",
    )
    activation_dropout: float = probability(0.0, "dropout after the activation")
    attention_bias: bool = option(False, "biases in the projections of attention")
    kv_heads: int | None = option(
        None,
        "heads of keys and values, each shared by heads / kv_heads heads of queries (Ainslie et al. 2023); 1: "
        "multi-query attention (Shazeer 2019); none: as many as --heads",
        min=1,
        max=65_536,
    )
    qk_norm: bool = option(False, "normalise the queries and keys of each head (Dehghani et al. 2023, section 2.1)")
    positions: Literal[
        "sinusoidal", "sinusoidal_halves", "sinusoidal_fairseq", "learned", "rotary", "relative", "alibi", "none"
    ] = option(
        "sinusoidal",
        "position encoding (section 3.5); sinusoidal_halves: all sines before the cosines; sinusoidal_fairseq: the "
        "same order, with the frequencies of fairseq and Marian; rotary: self-attention rotates queries and keys (Su "
        "et al. 2021); relative: learned vectors for distances (Shaw et al. 2018); alibi: scores fall with the "
        "distance (Press et al. 2022); none: the decoder sees the order through its causal mask only",
        finetuning="adapts",
    )
    rotary_base: float = option(
        10_000.0, "ratio of the longest to the shortest wavelength of rotary positions", above=1
    )
    max_distance: int = option(
        16, "relative positions clip distances to this number (Shaw et al. 2018, table 2)", min=1, max=65_536
    )
    position_offset: int = option(0, "position of the first token", min=0, max=16_777_216)
    max_positions: int = option(
        1024, "longest sentence in tokens, with learned positions", min=1, max=16_777_216, finetuning="free"
    )
    pre_norm: bool = option(False, "normalise before each sub-layer instead of after it")
    norm: Literal["layer", "rms"] = option(
        "layer", "layer norms (section 3.1), or RMSNorm without means and biases (Zhang and Sennrich 2019)"
    )
    residual: Literal["plain", "deepnorm", "admin"] = option(
        "plain",
        "weight of the residual connections; plain: 1; deepnorm and admin are for deep models with norms after the "
        "sub-layers; deepnorm: a constant, with smaller initial weights (Wang et al. 2022); admin: learned, initially "
        "from the variances of the sub-layers (Liu et al. 2020)",
    )
    window: int | None = option(
        None,
        "self-attention sees only a neighbourhood of this many tokens (r in section 4); none: all tokens",
        min=1,
        max=16_777_216,
    )
    encoder_self_attention: Literal["attention", "lightconv", "dynamicconv"] = option(
        "attention", "self-attention of the encoder, or a lightweight or dynamic convolution (Wu et al. 2019)"
    )
    decoder_self_attention: Literal["attention", "average", "ssru", "lightconv", "dynamicconv"] = option(
        "attention",
        "self-attention of the decoder, or its replacement; average: average attention (Zhang et al. 2018); ssru: "
        "simpler simple recurrent unit (Kim et al. 2019); lightconv, dynamicconv: convolutions (Wu et al. 2019); the "
        "state of a replacement has a fixed size",
    )
    kernels: tuple[int, ...] = option(
        (3, 7, 15, 31),
        "number of tokens that the convolution of each layer reads; the last number is also for all later layers",
        min=2,
        max=1_000,
    )
    average_ffn: bool = option(True, "apply a feed-forward network to the average in average attention")
    average_gate: bool = option(True, "combine the input and the average in average attention by a gate")
    average_separate_gates: bool = option(
        False, "in average attention, one gate reads the input and the other gate the average, as in Marian"
    )
    ssru_norm: bool = option(False, "the SSRU normalises both of its projections (--layer-normalization of Marian)")
    decoder_ffn: Literal["all", "none"] = option("all", "decoder layers with a feed-forward network")
    encoder_tied_layers: tuple[int, ...] = option(
        (),
        "a number for each encoder layer, such as 1,1,2,2; layers with the same number share all weights",
        min=1,
        max=1_000,
        finetuning="free",
    )
    decoder_tied_layers: tuple[int, ...] = option(
        (), "a number for each decoder layer, like --encoder-tied-layers", min=1, max=1_000, finetuning="free"
    )
    base_width: int | None = option(
        None,
        "width of the smaller model on which --lr was tuned; maximal update parametrization (Yang et al. 2021, table "
        "8) then scales the logits and the learning rates, so that this --lr is also good here; none: no scaling",
        min=1,
        max=65_536,
    )
    scale_embeddings: bool = option(True, "multiply token embeddings by sqrt(d_model) (section 3.4)")
    zero_bos: bool = option(False, "the decoder starts from zeros, as in Marian, instead of the embedding of bos")
    embedding_norm: bool = option(False, "normalise the embeddings before dropout")
    norm_eps: float = option(1e-5, "number added to the variance in layer norms", above=0, max=1, finetuning="adapts")
    share_embeddings: bool = option(
        True, "use one matrix for both embeddings if the vocabulary is joint", finetuning="free"
    )
    tie_output: bool = option(
        True, "use one matrix for the target embedding and the output projection (section 3.4)", finetuning="free"
    )
    output_bias: bool = option(False, "a bias in the output projection", finetuning="adapts")
    encoder_layerdrop: float = probability(0.0, "probability that an update skips an encoder layer")
    decoder_layerdrop: float = probability(0.0, "probability that an update skips a decoder layer")
    gradient_checkpointing: bool = option(
        False, "recompute layers in the backward pass, to save memory", finetuning="free"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.d_model % self.heads and (self.d_key is None or self.d_value is None):
            raise ValueError(
                f"--d-model {self.d_model} is not a multiple of --heads {self.heads}; "
                "give --d-key and --d-value, the widths of one head"
            )
        if self.position_offset and not self.positions.startswith("sinusoidal"):
            raise ValueError(f"--position-offset is for sinusoidal positions, not for --positions {self.positions}")
        for side in ("encoder", "decoder"):
            kind = getattr(self, f"{side}_self_attention")
            if self.positions in ATTENTION_POSITIONS and kind != "attention":
                raise ValueError(f"--positions {self.positions} needs --{side}-self-attention attention, not {kind}")
            numbers, layers = getattr(self, f"{side}_tied_layers"), getattr(self, f"{side}_layers")
            if numbers and len(numbers) != layers:
                raise ValueError(
                    f"--{side}-tied-layers has {len(numbers)} numbers, and there are {layers} {side} layers; give one "
                    "number for each layer"
                )
        if self.positions == "rotary" and self.key_width % 2:
            raise ValueError(f"--positions rotary needs heads of even width, not {self.key_width}; give --d-key")
        if self.kv_heads is not None and self.heads % self.kv_heads:
            raise ValueError(f"--heads {self.heads} is not a multiple of --kv-heads {self.kv_heads}")
        if self.base_width is not None and not self.scale_embeddings:
            raise ValueError("--base-width needs scaled embeddings; leave out --no-scale-embeddings")
        if self.residual != "plain" and self.pre_norm:
            raise ValueError(f"--residual {self.residual} is for norms after the sub-layers; leave out --pre-norm")
        # With --encoder-layers 0, the encoder may keep the same convolution as the decoder, because some presets set
        # both.
        encoder_differs = self.encoder_self_attention not in ("attention", self.decoder_self_attention)
        if not self.encoder_layers and (self.encoder_layerdrop or encoder_differs):
            flag = "--encoder-layerdrop" if self.encoder_layerdrop else "--encoder-self-attention"
            raise ValueError(f"{flag} does nothing without an encoder (--encoder-layers 0)")
        kinds = {self.decoder_self_attention, self.encoder_self_attention if self.encoder_layers else None}
        if self.window is not None and "attention" not in kinds:
            raise ValueError(f"--window needs self-attention, not {' and '.join(sorted(filter(None, kinds)))}")
        if not self.kernels:
            raise ValueError("--kernels is empty; give the width of the convolutions of each layer")
        convolves = {self.encoder_self_attention, self.decoder_self_attention} & {"lightconv", "dynamicconv"}
        if self.kernels != (3, 7, 15, 31) and not convolves:
            raise ValueError("--kernels needs a convolution, such as --decoder-self-attention lightconv")
        if convolves and self.d_model % self.heads:
            raise ValueError(f"convolutions need a --d-model that is a multiple of --heads, not {self.d_model}")
        for flag, changed, setting, needed in (
            ("--no-average-ffn", not self.average_ffn, "decoder_self_attention", "average"),
            ("--no-average-gate", not self.average_gate, "decoder_self_attention", "average"),
            ("--average-separate-gates", self.average_separate_gates, "decoder_self_attention", "average"),
            ("--ssru-norm", self.ssru_norm, "decoder_self_attention", "ssru"),
            ("--rotary-base", self.rotary_base != 10_000.0, "positions", "rotary"),
            ("--max-distance", self.max_distance != 16, "positions", "relative"),
        ):
            if changed and getattr(self, setting) != needed:
                raise ValueError(f"{flag} needs --{setting.replace('_', '-')} {needed}, not {getattr(self, setting)}")
        if self.average_separate_gates and not self.average_gate:
            raise ValueError("--average-separate-gates needs a gate; leave out --no-average-gate")

    @property
    def reads_source(self) -> bool:
        """Whether the model has an encoder. A model without an encoder is a language model of the target side."""
        return self.encoder_layers > 0

    @property
    def width_ratio(self) -> float:
        """The width of the model divided by `base_width`, or 1 without `base_width`."""
        return 1.0 if self.base_width is None else self.d_model / self.base_width

    def kernel(self, layer: int) -> int:
        """Returns the width of the convolution of a layer, counted from 0."""
        return self.kernels[min(layer, len(self.kernels) - 1)]

    @property
    def state_width(self) -> int:
        """The number of values that a decoder layer without self-attention keeps for each hypothesis."""
        if self.decoder_self_attention not in ("lightconv", "dynamicconv"):
            return self.d_model
        return self.d_model * (max(map(self.kernel, range(self.decoder_layers))) - 1)

    @property
    def inner(self) -> tuple[int, str, float]:
        """The inner width, the activation and the inner dropout of the feed-forward networks."""
        return self.d_ff, self.activation, self.activation_dropout

    @property
    def heads_of_keys(self) -> int:
        """The number of heads of keys, and of heads of values."""
        return self.kv_heads or self.heads

    @property
    def key_width(self) -> int:
        return self.d_key or self.d_model // self.heads

    @property
    def value_width(self) -> int:
        return self.d_value or self.d_model // self.heads


BASE = TransformerConfig()
BIG = replace(BASE, d_model=1024, d_ff=4096, heads=16, dropout=0.3)
# Language models are trained with norms before the sub-layers (Baevski and Auli 2019, section 4.1).
LANGUAGE_MODEL = replace(BASE, encoder_layers=0, pre_norm=True)
# the big model of Wu et al. 2019 for WMT English-German (section 5.1)
LIGHTCONV = replace(
    BIG, encoder_layers=7, encoder_self_attention="lightconv", decoder_self_attention="lightconv", attention_dropout=0.1
)
# Students are small models that learn from large models (teachers), for fast translation on CPUs. The sizes come from
# Mozilla's translation models. The encoder is deep and the decoder is shallow, because the encoder runs once for each
# sentence, and the decoder once for each token (Kim et al. 2019, Kasai et al. 2021). The decoder has SSRUs instead of
# self-attention. Marian supports all settings, so the weights can be exported.
STUDENT = replace(
    BASE,
    decoder_layers=2,
    decoder_self_attention="ssru",
    attention_bias=True,
    output_bias=True,
    zero_bos=True,
    positions="sinusoidal_fairseq",
    norm_eps=1e-6,
)
PRESETS = {
    "transformer_base": BASE,
    "transformer_big": BIG,
    "transformer_big_en_fr": replace(BIG, dropout=0.1),
    "transformer_iwslt_de_en": replace(BASE, d_ff=1024, heads=4, dropout=0.3),
    "transformer_tiny": replace(BASE, encoder_layers=4, decoder_layers=4, d_model=128, d_ff=256, heads=4),
    "transformer_lm": LANGUAGE_MODEL,
    "transformer_lm_big": replace(LANGUAGE_MODEL, decoder_layers=12, d_model=1024, d_ff=4096, heads=16),
    "transformer_lm_tiny": replace(LANGUAGE_MODEL, decoder_layers=4, d_model=128, d_ff=256, heads=4),
    "lightconv": LIGHTCONV,
    "dynamicconv": replace(LIGHTCONV, encoder_self_attention="dynamicconv", decoder_self_attention="dynamicconv"),
    "student_base": STUDENT,
    "student_base_memory": replace(STUDENT, decoder_layers=4, d_model=384, d_ff=1536),
    "student_tiny": replace(STUDENT, d_model=256, d_ff=1536),
    "student_12_1": replace(STUDENT, encoder_layers=12, decoder_layers=1),
}
