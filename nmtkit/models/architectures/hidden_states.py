"""Hidden states of an encoder or a decoder: the input of the first layer, and the output of each layer."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from nmtkit.data.packed import Packed
from nmtkit.models.architectures.interface import Architecture

# S source tokens, T target tokens, D model width


def encoder_states(model: Architecture, source: Packed) -> list[Tensor]:
    """Returns the states of an encoder of n layers: n+1 tensors [S, D].

    The first tensor is the input of the first layer (embeddings and positions). The others are the outputs of the
    layers. The last tensor is the memory: the output of the last layer after the final normalisation, if the model has
    one. Gradients reach the parameters through the states, unless gradients are disabled.

    Raises ValueError for an architecture whose encoder is not a list of layers from [S, D] to [S, D].
    """
    with _recorded(model, "encoder", source.layout.tokens) as states:
        memory = model.encode(source).values
    return [*states[:-1], memory]


def decoder_states(model: Architecture, source: Packed, target_input: Packed) -> list[Tensor]:
    """Returns the states of a decoder of n layers with teacher forcing: n+1 tensors [T, D], like `encoder_states`.

    The last tensor is the input of the output projection. Row t is the state that predicts target token t.
    """
    memory = model.encode(source)
    with _recorded(model, "decoder", target_input.layout.tokens) as states:
        features = model.decode(memory, target_input)
    return [*states[:-1], features]


@contextmanager
def _recorded(model: Architecture, stack: str, tokens: int) -> Iterator[list[Tensor]]:
    """Records the input of the first layer and the output of each layer of `model.encoder` or `model.decoder`."""
    layers = getattr(model, stack, None)
    error = ValueError(
        f"the {stack} of {type(model).__name__} is not a list of layers that map [tokens, width] to [tokens, width]; "
        "register forward hooks on the modules of `model.architectures[0]` instead"
    )
    if not isinstance(layers, nn.ModuleList) or not len(layers):
        raise error
    states: list[Tensor] = []

    def record(value: Any) -> None:
        if not isinstance(value, Tensor) or value.dim() != 2 or len(value) != tokens:
            raise error
        states.append(value)

    with ExitStack() as hooks:
        before = layers[0].register_forward_pre_hook(lambda module, inputs: None if states else record(inputs[0]))
        hooks.enter_context(before)
        # tied layers occur several times in the list, but get only one hook, which runs at each call
        for layer in dict.fromkeys(layers):
            hooks.enter_context(layer.register_forward_hook(lambda module, inputs, output: record(output)))
        yield states
