"""A part of `gpu.py`: compares results on a GPU with results on a CPU. Each row has errors and whether they are `ok`.

References are computed in fp32 or fp64 on the CPU from the same rounded inputs, so that an error comes from the kernel
alone. Some units of 2^-8 in bf16, of 2^-11 in fp16 and TF32, and of 2^-23 in fp32 are normal.
"""

import copy
import functools
from collections.abc import Iterator

import torch
from gpu import Row, Scale
from gpu_speed import lengths_of, micro_batch, options_of, random_sentences
from torch import Tensor, nn

from nmtkit.config import derive
from nmtkit.data.packed import IGNORE_INDEX, Layout, Packed
from nmtkit.data.tokenizers.tokenizer import EOS
from nmtkit.models.architectures import ARCHITECTURES, Vocabulary
from nmtkit.models.layers import attention as attentions
from nmtkit.models.layers.attention_reference import AttentionSpec, reference_attention
from nmtkit.models.layers.dropout import add_and_norm, dropout
from nmtkit.models.layers.logsumexp_gpu import logsumexp
from nmtkit.models.layers.losses import cross_entropy, output_cross_entropy, output_two_pass_loss
from nmtkit.translation.engines.continuous_batching import ContinuousBatching
from nmtkit.translation.search.decoding import beam_search
from nmtkit.translation.search.gpu_beam_search import Eager
from nmtkit.translation.search.scorer import BLOCK
from nmtkit.translation.search.types import BatchHypotheses

TOLERANCES = {torch.float32: 3e-3, torch.bfloat16: 2e-2, torch.float16: 5e-3}  # relative errors; fp32 may use TF32


def correctness(scale: Scale) -> Iterator[Row]:
    device = torch.device(scale.device, 0) if scale.device == "cuda" else torch.device("cpu")
    torch.manual_seed(1)
    for check in (attention, residuals, losses, normalizers, whole_model, searches):
        yield from check(device, scale)


def error(got: Tensor, expected: Tensor) -> float:
    """Returns the largest difference, relative to the largest expected value."""
    got, expected = got.detach().double().cpu(), expected.detach().double().cpu()
    return float((got - expected).abs().max() / expected.abs().max().clamp(min=1e-30))


def judged(name: str, errors: dict[str, float], tolerance: float) -> Row:
    return {"check": name, **errors, "ok": all(value <= tolerance for value in errors.values())}


def on(device: torch.device, *tensors: Tensor) -> list[Tensor]:
    return [tensor.detach().to(device).requires_grad_(tensor.is_floating_point()) for tensor in tensors]


def attention(device: torch.device, scale: Scale) -> Iterator[Row]:
    """Compares every backend of the device, forward and backward, with the reference in fp32 on the CPU."""
    generator = torch.Generator().manual_seed(2)
    queries, keys = (Layout.of(lengths_of(scale.max_tokens[0], generator)[:20]) for _ in range(2))
    sentences = min(queries.sentences, keys.sentences)
    queries, keys = (Layout.of(layout.lengths[:sentences]) for layout in (queries, keys))
    kinds = {
        "self": (queries, queries, AttentionSpec()),
        "causal": (queries, queries, AttentionSpec(causal=True)),
        "window": (queries, queries, AttentionSpec(window=8)),
        "causal window": (queries, queries, AttentionSpec(causal=True, window=8)),
        "cross": (queries, keys, AttentionSpec()),
    }
    dtypes = (torch.bfloat16, torch.float16, torch.float32) if device.type == "cuda" else (torch.float32,)
    for dtype in dtypes:
        for key_width, value_width in ((64, 64), (32, 64), (16, 128), (20, 28)):
            for kind, (query_layout, key_layout, spec) in kinds.items():
                shapes = (queries.tokens, key_width), (key_layout.tokens, key_width), (key_layout.tokens, value_width)
                inputs = [torch.randn(n, 2, width, generator=generator).to(dtype) for n, width in shapes]
                direction = torch.randn(queries.tokens, 2, value_width, generator=generator).to(dtype)
                expected = on(torch.device("cpu"), *(x.float() for x in inputs))
                result = reference_attention(*expected, query_layout, key_layout, spec)
                result.backward(direction.float())
                given = on(device, *inputs)
                layouts = query_layout.to(device), key_layout.to(device)
                layouts = (layouts[0], layouts[0]) if query_layout is key_layout else layouts
                got = attentions.attention(*given, *layouts, spec)
                got.backward(direction.to(device))
                errors = {"forward": error(got, result)}
                for name, ours, theirs in zip(("query", "key", "value"), given, expected, strict=True):
                    assert ours.grad is not None and theirs.grad is not None
                    errors[name] = error(ours.grad, theirs.grad)
                title = f"{kind} attention, {dtype}, keys {key_width}, values {value_width}, {got.device.type}"
                yield judged(title, errors, TOLERANCES[dtype])


def residuals(device: torch.device, scale: Scale) -> Iterator[Row]:
    """Compares norm(x + change). Then checks which share of elements dropout keeps, and the scale of these elements."""
    x, change, direction = (torch.randn(300, 512) for _ in range(3))
    norm = nn.LayerNorm(512)
    dtypes = (torch.float32, torch.bfloat16) if device.type == "cuda" else (torch.float32,)
    for dtype in dtypes:
        expected = on(torch.device("cpu"), x.to(dtype).float(), change.to(dtype).float())
        result = norm(expected[0] + expected[1])
        result.backward(direction)
        given, own = on(device, x.to(dtype), change.to(dtype)), copy.deepcopy(norm).to(device)
        own.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
            got = add_and_norm(given[0], given[1], own, 0.0)
        got.backward(direction.to(device, got.dtype))
        errors = {"forward": error(got, result)}
        for name, ours, theirs in zip(("x", "change"), given, expected, strict=True):
            assert ours.grad is not None and theirs.grad is not None
            errors[name] = error(ours.grad, theirs.grad)
        yield judged(f"residual, {dtype}", errors, TOLERANCES[dtype])
    kept = dropout(torch.ones(1 << 20, device=device), 0.1)
    share = float((kept != 0).float().mean())
    yield judged("dropout", {"dropped": abs(share - 0.9), "mean": abs(float(kept.mean()) - 1)}, 3e-3)


def losses(device: torch.device, scale: Scale) -> Iterator[Row]:
    """Compares fused losses with plain losses in fp64: value, log-likelihood, and gradients of features and weight."""
    tokens, width, vocabulary = 700, 512 if device.type == "cuda" else 32, scale.vocabulary
    projection = nn.Linear(width, vocabulary, bias=False)
    features = torch.randn(2, tokens, width)
    target = torch.randint(0, vocabulary, (tokens,))
    target[::17] = IGNORE_INDEX
    dtypes = (torch.float32, torch.bfloat16, torch.float16) if device.type == "cuda" else (torch.float32,)
    for dtype in dtypes:
        rounded, weight = features.to(dtype), projection.weight.detach().to(dtype)
        exact = nn.Linear(width, vocabulary, bias=False).double()
        exact.weight = nn.Parameter(weight.double())
        for name in ("cross-entropy", "R-Drop"):
            passes = on(torch.device("cpu"), *rounded.double())
            given, own = on(device, *rounded), copy.deepcopy(projection).to(device)
            with torch.no_grad():
                own.weight.copy_(weight)
            exact.zero_grad()
            with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
                if name == "R-Drop":
                    expected = output_two_pass_loss(nn.Sequential(exact), *passes, target, 0.1, share=0.5, alpha=2.5)
                    got = output_two_pass_loss(own, *given, target.to(device), 0.1, share=0.5, alpha=2.5)
                else:
                    expected = cross_entropy(exact(passes[0]), target, 0.1)
                    got = output_cross_entropy(own, given[0], target.to(device), 0.1)
            expected[0].backward()
            got[0].backward()
            assert own.weight.grad is not None and given[0].grad is not None
            errors = {"loss": error(got[0], expected[0]), "nll": error(got[1], expected[1])}
            errors["features"] = error(given[0].grad, passes[0].grad)
            errors["weight"] = error(own.weight.grad, exact.weight.grad)
            yield judged(f"{name}, {dtype}", errors, TOLERANCES[dtype])


def normalizers(device: torch.device, scale: Scale) -> Iterator[Row]:
    """Compares the log-sum-exp of logits, and the maximum of each block if it is computed, with fp64."""
    logits = 10 * torch.randn(64, scale.vocabulary)
    result, maxima = logsumexp(logits.to(device), BLOCK)
    errors = {"log-sum-exp": error(result, logits.double().logsumexp(1))}
    if maxima is not None:
        whole = scale.vocabulary // BLOCK
        blocks = logits[:, : whole * BLOCK].unflatten(1, (whole, BLOCK))
        errors["maxima"] = error(maxima, blocks.amax(2))
    yield judged("log-sum-exp" + (", fused" if maxima is not None else ""), errors, 1e-5)


def whole_model(device: torch.device, scale: Scale) -> Iterator[Row]:
    """Compares loss and gradient of a small Transformer in fp32 on the device and on the CPU."""
    model = small_model(scale.vocabulary).train()
    batch = micro_batch(400, scale.vocabulary, torch.Generator().manual_seed(3))
    gradients, values = [], []
    for target in (torch.device("cpu"), device):
        copied, moved = copy.deepcopy(model).to(target), batch.to(target)
        features = copied(moved.source, moved.target_input)
        loss = output_cross_entropy(copied.output_projection, features, moved.target_output, 0.1)[0]
        loss.backward()
        values.append(loss)
        gradients.append(torch.cat([parameter.grad.flatten().cpu() for parameter in copied.parameters()]))
    errors = {"loss": error(values[1], values[0]), "gradient": error(gradients[1], gradients[0])}
    cosine = torch.cosine_similarity(gradients[0].double(), gradients[1].double(), dim=0)
    yield judged("whole model, fp32", errors | {"direction": 1 - float(cosine)}, 5e-3)


def small_model(vocabulary: int) -> nn.Module:
    """Returns a random model without dropout, whose translations have many lengths."""
    entry = ARCHITECTURES["transformer_tiny"]
    changes = {"dropout": 0.0, "encoder_layers": 2, "decoder_layers": 2}
    size = Vocabulary(source=vocabulary, target=vocabulary, joint=True)
    model = entry.factory(derive(entry.preset, changes, "this check"), size).eval()
    with torch.no_grad():
        model.output_projection.weight.mul_(2.0)
        model.output_projection.weight[EOS] *= 1.5
    return model


def searches(device: torch.device, scale: Scale) -> Iterator[Row]:
    """Compares continuous batching, with and without CUDA graphs, with the plain beam search in all precisions."""
    vocabulary = min(scale.vocabulary, 4_000)
    sentences = random_sentences(96 if device.type == "cuda" else 6, vocabulary)
    for precision in ("fp32", "bf16", "autocast") if device.type == "cuda" else ("fp32",):
        model = small_model(vocabulary).to(device, torch.bfloat16 if precision == "bf16" else torch.float32)
        under_autocast = functools.partial(torch.autocast, device.type, torch.bfloat16, enabled=precision == "autocast")
        for beam in scale.beams:
            options = options_of(beam)
            source = Packed.from_lists([sentence.ids for sentence in sentences], device)
            with under_autocast():
                expected = beam_search([model], source, options)
            for backend in (None, Eager):
                search = ContinuousBatching([model], options, 24, device, backend)
                with under_autocast():
                    results = [hypotheses for _, batch in search.decode([sentences]) for hypotheses in batch]
                kind = "eager" if backend else "CUDA graphs"
                yield compared(f"graph search, {precision}, beam {beam}, {kind}", results, expected)


def compared(name: str, results: BatchHypotheses, expected: BatchHypotheses) -> Row:
    """Returns a row that is `ok` if nearly all translations are equal and all scores are nearly equal.

    Not all translations must be equal, because rounding may exchange two hypotheses with equal scores.
    """
    pairs = [(ours[0], theirs[0]) for ours, theirs in zip(results, expected, strict=True)]
    same = sum(ours.tokens == theirs.tokens for ours, theirs in pairs) / len(pairs)
    worst = max(abs(ours.score - theirs.score) / max(1.0, abs(theirs.score)) for ours, theirs in pairs)
    sixteen = "fp32" not in name
    return {
        "check": name,
        "same": same,
        "score": worst,
        "ok": same >= (0.8 if sixteen else 0.99) and worst <= (0.05 if sixteen else 1e-3),
    }
