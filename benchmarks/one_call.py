"""Milliseconds of a Transformer's decoder step on a CPU, from token ids to logits, when it is one call of a compiler.

    python benchmarks/one_call.py DATA [--only transformer_tiny,rows1,fp32] [--rounds 7]

DATA is a dataset as `nmtkit preprocess` makes it: vocabulary and lines are its own, weights random. Contestants that
are not installed are left out: ONNX Runtime needs onnx, onnxscript and onnxruntime, CTranslate2 `nmtkit[export]`.

A contestant steps through 16 given tokens of one sentence with one hypothesis (rows1) or four (rows4), over a source of
16. `nmtkit` is the step that it searches with (`KVCache`, prepacked weights). The others are `Transformer.static_step`,
whose caches keep their shape: in eager torch, traced, compiled by Inductor, exported. How far their last logits are
from those of nmtkit's step in the same precision stands last. CTranslate2 has no step to call: of it, and of nmtkit
beside it, `search` is a 16th of what translations of 18 steps take longer than those of 2, with a beam of that many.

One thread; contestants take turns, sentence by sentence, and of each the median sentence counts.
"""

import argparse
import copy
import importlib.util
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nmtkit import checkpoint, models
from nmtkit.architectures import ARCHITECTURES
from nmtkit.architectures.transformer import Transformer
from nmtkit.data.binarized import Dataset
from nmtkit.formats import ctranslate2 as export
from nmtkit.layers.packed import Packed
from nmtkit.layers.prepack import Precision, prepack
from nmtkit.layers.static_kv_cache import CacheLengths
from nmtkit.translation.translator import Translator

STEPS = SOURCE = 16
SHORT = 2  # steps of the translation whose time is taken off
REPEAT = 3  # sentences of a turn, so that the others' weights have left the processor's caches after the first

Step = Callable[[int, Tensor], Tensor]  # position, tokens -> logits
Contestant = Callable[[], tuple[float, Tensor | None]]  # -> milliseconds a step, the last logits


class StaticStep(nn.Module):
    """`Transformer.static_step` with its caches as arguments, which it changes in place or returns anew."""

    def __init__(self, model: Transformer, rows: int, memory: Packed, in_place: bool = True) -> None:
        super().__init__()
        self.model, self.in_place, self.lengths = model, in_place, CacheLengths(STEPS, SOURCE)
        state = model.static_start(1, rows, STEPS, SOURCE)
        state.insert(torch.tensor([0]), memory)
        # a tensor for each layer, or else one that is not changed in place would be copied whole by every layer
        self.caches = [state.ancestors, *(x.clone() for x in (*state.keys, *state.values))]
        self.state = state

    def forward(self, tokens: Tensor, position: Tensor, *caches: Tensor) -> tuple[Tensor, ...]:
        if not self.in_place:
            caches = tuple(cache.clone() for cache in caches)
        self.state.ancestors, layers = caches[0], len(caches) // 2
        self.state.keys, self.state.values = caches[1 : layers + 1], caches[layers + 1 :]  # type: ignore[assignment]
        logits = self.model.static_step(tokens, position, self.state, self.lengths)
        return (logits,) if self.in_place else (logits, *caches)


def sentence(tokens: Tensor, start: Callable[[], Step]) -> Contestant:
    def run() -> tuple[float, Tensor]:
        step = start()
        began = time.perf_counter()
        for position in range(STEPS):
            logits = step(position, tokens[position])
        return 1000 * (time.perf_counter() - began) / STEPS, logits.clone()

    return run


def nmtkit_step(model: Transformer, rows: int, memory: Packed, precision: Precision) -> Callable[[], Step]:
    model = copy.deepcopy(model)
    prepack(model, precision)

    def start() -> Step:
        state = model.start(memory, rows)

        def step(position: int, tokens: Tensor) -> Tensor:
            with torch.inference_mode():
                return model.step(tokens, state)

        return step

    return start


def called(module: StaticStep, call: Callable[..., tuple[Tensor, ...]], inference: bool) -> Callable[[], Step]:
    """Returns steps by `call`, which takes the arguments of `module` and changes its caches."""
    positions = [torch.tensor([position]) for position in range(STEPS)]
    caches = [cache.clone() for cache in module.caches]

    def step(position: int, tokens: Tensor) -> Tensor:
        with torch.inference_mode() if inference else torch.no_grad():
            return call(tokens, positions[position], *caches)[0]

    return lambda: step


def traced(module: StaticStep, tokens: Tensor) -> Callable[..., tuple[Tensor, ...]]:
    inputs = (tokens, torch.tensor([1]), *(cache.clone() for cache in module.caches))
    frozen = torch.jit.freeze(torch.jit.trace(module.eval(), inputs, check_trace=False))
    return torch.jit.optimize_for_inference(frozen)  # type: ignore[no-any-return]


class Output(nn.Module):
    """A quantised output projection with a `weight`, of which `static_step` asks the type."""

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.linear, self.weight = linear, torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def dynamically_quantized(model: Transformer) -> Transformer:
    """torch's own int8: nmtkit's prepacked weights are in oneDNN's layout, which a trace cannot hold."""
    quantized = torch.ao.quantization.quantize_dynamic(copy.deepcopy(model), {nn.Linear}, torch.qint8)
    quantized.output_projection = Output(quantized.output_projection)
    return quantized


def inductor(module: StaticStep, cpp_wrapper: bool) -> Callable[..., tuple[Tensor, ...]]:
    options = {"freezing": True, "cpp_wrapper": cpp_wrapper}
    return torch.compile(module, dynamic=False, fullgraph=True, options=options)


def onnx_runtime(module: StaticStep, tokens: Tensor, folder: Path, int8: bool) -> Callable[[], Step]:
    """The caches that a step returns are bound as the inputs of the next."""
    import onnxruntime
    from onnxruntime.quantization import QuantType, quantize_dynamic

    path, count = folder / "step.onnx", len(module.caches)
    if not path.exists():
        inputs = (tokens, torch.tensor([1]), *module.caches)
        names = ["tokens", "position", *(f"in{i}" for i in range(count))]
        results = ["logits", *(f"out{i}" for i in range(count))]
        torch.onnx.export(module, inputs, path, dynamo=True, input_names=names, output_names=results, verbose=False)
    if int8:
        quantize_dynamic(path, folder / "int8.onnx", weight_type=QuantType.QInt8, op_types_to_quantize=["MatMul"])
        path = folder / "int8.onnx"
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    value = onnxruntime.OrtValue.ortvalue_from_numpy
    buffers = [[value(cache.numpy().copy()) for cache in module.caches] for _ in range(2)]
    place, positions = value(tokens.numpy()), [value(torch.tensor([i]).numpy()) for i in range(STEPS)]
    logits = value(torch.zeros(len(tokens), module.model.output_projection.out_features).numpy())
    wanted = {entry.name for entry in session.get_inputs()}
    bindings = []
    for position in range(STEPS):
        binding = session.io_binding()
        given = {"tokens": place, "position": positions[position]}
        given |= {f"in{i}": buffers[position % 2][i] for i in range(count)}
        for name in wanted:
            binding.bind_ortvalue_input(name, given[name])
        binding.bind_ortvalue_output("logits", logits)
        for i in range(count):
            binding.bind_ortvalue_output(f"out{i}", buffers[1 - position % 2][i])
        bindings.append(binding)

    def step(position: int, tokens: Tensor) -> Tensor:
        place.update_inplace(tokens.numpy())
        session.run_with_iobinding(bindings[position])
        return torch.from_numpy(logits.numpy())

    return lambda: step


def searched(translate: Callable[[int], Any]) -> Contestant:
    def seconds(steps: int) -> float:
        began = time.perf_counter()
        translate(steps)
        return time.perf_counter() - began

    return lambda: (1000 * (seconds(SHORT + STEPS) - seconds(SHORT)) / STEPS, None)


def searches(path: Path, line: str, rows: int, precision: Precision, folder: Path) -> dict[str, Contestant]:
    translator = Translator.load(path, precision=precision)

    def nmtkit(steps: int) -> Any:
        return translator.translate([line], beam=rows, min_len=steps - 1, max_len_a=0, max_len_b=steps - 1)

    found = {"nmtkit, search": searched(nmtkit)}
    if importlib.util.find_spec("ctranslate2"):
        import ctranslate2
        import sentencepiece

        directory, kind = folder / f"{path.stem}-{precision}", "int8" if precision == "int8" else "float32"
        if not directory.exists():
            export.save(path, directory, kind)  # type: ignore[arg-type]
        engine = ctranslate2.Translator(str(directory), inter_threads=1, intra_threads=1, compute_type=kind)
        model = sentencepiece.SentencePieceProcessor(model_file=str(next(directory.glob("*.model"))))
        pieces = model.encode([line], out_type=str)

        def ctranslate2_search(steps: int) -> Any:
            return engine.translate_batch(pieces, beam_size=rows, min_decoding_length=steps, max_decoding_length=steps)

        found["CTranslate2, search"] = searched(ctranslate2_search)
    return found


def contestants(
    model: Transformer, path: Path, line: str, rows: int, precision: Precision, tokens: Tensor, folder: Path
) -> dict[str, Contestant]:
    with torch.inference_mode(False), torch.no_grad():
        memory = model.encode(Packed.from_lists([list(range(10, 10 + SOURCE))]))
        starts = {"nmtkit": nmtkit_step(model, rows, memory, precision)}
        if precision == "fp32":
            plain = StaticStep(model, rows, memory)
            starts["static step, eager"] = called(plain, plain, inference=True)
            starts["traced"] = called(plain, traced(plain, tokens[0]), inference=True)
            for name, cpp_wrapper in {"Inductor": False, "Inductor, C++ wrapper": True}.items():
                torch._dynamo.reset()
                compiled = called(plain, inductor(plain, cpp_wrapper), inference=False)
                sentence(tokens, compiled)()
                starts[name] = compiled
        else:
            small = StaticStep(dynamically_quantized(model), rows, memory)
            starts["traced"] = called(small, traced(small, tokens[0]), inference=True)
        if all(importlib.util.find_spec(name) for name in ("onnx", "onnxscript", "onnxruntime")):
            module = StaticStep(model, rows, memory, in_place=False).eval()
            exported = folder / f"{path.stem}-{rows}"
            exported.mkdir(exist_ok=True)
            starts["ONNX Runtime"] = onnx_runtime(module, tokens[0], exported, precision == "int8")
    steps = {name: sentence(tokens, start) for name, start in starts.items()}
    return steps | searches(path, line, rows, precision, folder)


def measure(found: dict[str, Contestant], rounds: int) -> None:
    times: dict[str, list[float]] = {name: [] for name in found}
    logits: dict[str, Tensor | None] = {}
    for turn in range(rounds + 1):
        for name, run in found.items():
            for _ in range(REPEAT):
                milliseconds, logits[name] = run()
                if turn:
                    times[name].append(milliseconds)
    ours, expected = statistics.median(times["nmtkit"]), logits["nmtkit"]
    for name, milliseconds in times.items():
        middle, result = statistics.median(milliseconds), logits[name]
        least = min(milliseconds)
        apart = "" if result is None or expected is None else f"{(result - expected).abs().max().item():10.1e}"
        print(f"    {name:<24}{middle:8.3f} ms{least:9.3f} at best{ours / middle:7.2f}x{apart}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--only", default="", help="words, by commas: models, rows1 or rows4, fp32 or int8")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    only = set(filter(None, arguments.only.split(",")))

    def chosen(words: list[str]) -> list[str]:
        return [word for word in words if word in only] or words

    data = Dataset.open(arguments.data)
    line = next(line for line in data["test"].source_lines() if len(line.split()) == 12)
    with tempfile.TemporaryDirectory() as name:
        for kind in chosen(["transformer_tiny", "transformer_base"]):
            torch.manual_seed(1)
            preset, path = ARCHITECTURES[kind].preset, Path(name) / f"{kind}.pt"
            model = models.build(kind, preset, models.vocabulary_of(data.tokenizer)).eval()
            checkpoint.save(path, models.to_checkpoint(model, kind, preset, data.tokenizer, [], 0))
            assert isinstance(model, Transformer)
            for rows in chosen(["rows1", "rows4"]):
                tokens = torch.randint(10, model.output_projection.out_features, (STEPS, int(rows[4:])))
                for precision in chosen(["fp32", "int8"]):
                    print(f"{kind} {rows} {precision}", flush=True)
                    arguments_of = (model, path, line, int(rows[4:]), precision, tokens, Path(name))
                    measure(contestants(*arguments_of), arguments.rounds)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
