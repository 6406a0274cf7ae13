"""A wrong name of an argument of the Python interface is told with the right name."""

from collections.abc import Callable
from typing import Any

import pytest
from builders import save_tiny_transformer, tiny_tokenizer

import nmtkit


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> nmtkit.Model:
    path = tmp_path_factory.mktemp("model") / "model.pt"
    save_tiny_transformer(path, tiny_tokenizer())
    return nmtkit.load(path)


def test_a_flag_of_train_that_is_given_as_an_argument_belongs_into_the_dict() -> None:
    with pytest.raises(ValueError, match=r"'arch'.*\{'arch': 'transformer_tiny'\}") as told:
        nmtkit.train(arch="transformer_tiny", data="data-bin")  # type: ignore[call-arg]
    assert "settings" in str(told.value) and "callbacks" in str(told.value)


CALLS: dict[str, tuple[Callable[[nmtkit.Model, Any], Any], str]] = {
    "train": (lambda model, more: nmtkit.train({}, "data-bin", **more(callback=[])), "did you mean 'callbacks'"),
    "average": (lambda model, more: nmtkit.average("run", "a.pt", **more(lasts=5)), "did you mean 'last'"),
    "preprocess": (lambda model, more: nmtkit.preprocess(**more(trainprefs="x")), "did you mean 'trainpref'"),
    "score": (lambda model, more: nmtkit.score(["a"], ["b"], **more(lower_case=True)), "did you mean 'lowercase'"),
    "load": (lambda model, more: nmtkit.load("m.pt", **more(devices="cpu")), "did you mean 'device'"),
    "translate": (lambda model, more: model.translate("sate", **more(beams=2)), "did you mean 'beam'"),
    "model.score": (lambda model, more: model.score("a", "b", **more(per_pieces=1)), "did you mean 'per_piece'"),
    "batch": (lambda model, more: model.batch("a", **more(source_langs="en")), "did you mean 'source_lang'"),
    "logits": (lambda model, more: model.logits("a", "b", **more(pad=True)), "did you mean 'padded'"),
    "encode": (lambda model, more: model.encode("a", **more(pool="mean")), "did you mean 'pooling'"),
    "encode, language": (lambda model, more: model.encode("a", **more(sourcelang="en")), "did you mean 'source_lang'"),
    "decoder_states": (lambda model, more: model.decoder_states("a", "b", **more(to=1)), "known: "),
    "attention": (lambda model, more: model.attention("a", **more(beams=2)), "did you mean 'beam'"),
}


@pytest.mark.parametrize(("call", "told"), CALLS.values(), ids=CALLS)
def test_each_door_suggests_the_right_name(
    call: Callable[[nmtkit.Model, Any], Any], told: str, model: nmtkit.Model
) -> None:
    with pytest.raises(ValueError, match=told):
        call(model, dict)
