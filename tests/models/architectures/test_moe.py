import pytest
import torch

from nmtkit.data.packed import Packed
from nmtkit.models.architectures import Vocabulary
from nmtkit.models.architectures.moe import MoE, MoEConfig, TransformerMoE, TransformerMoEConfig
from nmtkit.models.layers.experts import Experts

CONFIG = MoEConfig(
    encoder_layers=3, decoder_layers=2, d_model=4, d_hidden=7, d_expert=5, experts=6, expert_groups=None, dropout=0.0
)
VOCABULARY = Vocabulary(source=11, target=13, joint=False)
SOURCE, TARGET = Packed.from_lists([[3, 5, 2], [4, 2]]), Packed.from_lists([[1, 4], [1, 6, 7, 8]])


def test_experts_stand_below_the_top_layer_inside_residual_connections() -> None:
    """If all LSTMs return zeros, the encoder computes x + sigmoid(experts(x))."""
    torch.manual_seed(2)
    model = MoE(CONFIG, VOCABULARY).eval()
    for layer in (model.bottom_encoder, *model.encoder):
        for parameter in layer.parameters():
            torch.nn.init.zeros_(parameter)
    torch.nn.init.normal_(model.encoder_experts.gate)
    x = model.source_embedding(SOURCE.values)
    expected = x + torch.sigmoid(model.encoder_experts(x))
    torch.testing.assert_close(model.encode(SOURCE).values[:, :4], expected)


def test_auxiliary_losses_are_those_of_both_mixture_layers() -> None:
    torch.manual_seed(2)
    model = MoE(CONFIG, VOCABULARY).train()
    model(SOURCE, TARGET)
    parts = [layer.balance_losses[0] for layer in (model.encoder_experts, model.decoder_experts)]
    expected = {name: float(sum(part[name] for part in parts).detach()) for name in ("importance", "load")}
    losses = {name: float(loss.detach()) for name, loss in model.auxiliary_losses().items()}
    assert losses == pytest.approx(expected)


def test_the_transformer_has_experts_in_every_layer_and_no_feed_forward_network() -> None:
    config = TransformerMoEConfig(encoder_layers=2, decoder_layers=2, d_model=8, d_ff=5, heads=2, experts=4)
    model = TransformerMoE(config, VOCABULARY)
    assert sum(isinstance(module, Experts) for module in model.modules()) == 4
    assert all(isinstance(layer.feed_forward, Experts) for layer in (*model.encoder, *model.decoder))
    assert model.encoder[0].feed_forward.fc1.shape == (4, 8, 5)


def test_gradient_checkpointing_changes_no_auxiliary_loss_of_any_update() -> None:
    """The second update would also count the losses of the forward pass that the first backward pass repeats."""
    results = []
    for checkpointed in (False, True):
        torch.manual_seed(2)
        config = TransformerMoEConfig(
            encoder_layers=1,
            decoder_layers=1,
            d_model=8,
            d_ff=5,
            heads=2,
            experts=4,
            expert_groups=None,
            gradient_checkpointing=checkpointed,
        )
        model = TransformerMoE(config, VOCABULARY).train()
        updates = []
        for _ in range(2):
            features = model(SOURCE, TARGET)
            losses = model.auxiliary_losses()
            (features.square().sum() + sum(losses.values())).backward()
            updates.append({name: float(loss.detach()) for name, loss in losses.items()})
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        results.append((updates, [float(gradient.norm()) for gradient in gradients]))
    (expected, norms), (updates, again) = results
    assert updates == expected and again == pytest.approx(norms, rel=1e-5)


def test_more_active_experts_than_there_are_is_refused() -> None:
    with pytest.raises(ValueError, match="--active-experts is 6"):
        MoEConfig(experts=6, expert_groups=None, active_experts=6)
    with pytest.raises(ValueError, match="--active-experts is 0"):
        TransformerMoEConfig(active_experts=0)
