"""Decoding speed of an imported model on a CPU, beside transformers, from which it comes, and CTranslate2.

    python benchmarks/imported_speed.py --text data/train --source test.en -s en -t de [--rounds 3] [--only …]

The model has the shape of OPUS-MT's: 6 + 6 layers 512 wide, feed-forward 2,048 with swish, 8 heads, one matrix of
58,101 entries, two SentencePiece models (trained on the text; the rest of the entries is never met). It is saved by
transformers with random weights, read by `nmtkit import`, and given to CTranslate2 by `nmtkit export`. As random
weights do not end, every output is forced to 15 steps. Needs transformers and `nmtkit[export]`.

Two cores: two processes of one thread (nmtkit), two translators of one thread (CTranslate2), two threads
(transformers). A turn is from lines to translated lines. Each sorts its lines by length and takes the batches that are
its fastest here: `--batches 16,32,64` tries others, and `--max-tokens 512,1024,2048` those of nmtkit. The int8 of
transformers is torch's dynamic quantization of all linear layers. Systems take turns; of each the median round counts.
The model and the seconds stay in the folder, so that the rounds may be spread over several runs.
"""

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import sentencepiece
import torch

from nmtkit import checkpoint
from nmtkit.formats import ctranslate2 as ctranslate2_export
from nmtkit.formats import huggingface
from nmtkit.search.options import SearchOptions
from nmtkit.translation.parallel import worker_processes
from nmtkit.translation.requests import Request
from nmtkit.translation.translator import Translator

CORES = 2
STEPS = 15  # of every output, the last of which is eos
ENTRIES = 58_101
PIECES = 16_000  # of each SentencePiece model, at most
BEAM = 4
# sentences of a batch that are each one's fastest here; nmtkit's default, 2,048 source tokens, is --max-tokens
BATCHES = {"transformers": 32, "CTranslate2": 32}
System = Callable[[], list[str]]


def write_model(folder: Path, text: list[Path]) -> None:
    """Writes a folder as OPUS-MT has it."""
    from transformers import MarianConfig, MarianMTModel

    folder.mkdir(parents=True)
    pieces: dict[str, None] = dict.fromkeys(["</s>", "<unk>"])
    for side, path in zip(("source", "target"), text, strict=True):
        sentencepiece.SentencePieceTrainer.train(
            input=str(path), model_prefix=str(folder / side), vocab_size=PIECES, hard_vocab_limit=False, minloglevel=2
        )
        model = (folder / f"{side}.model").rename(folder / f"{side}.spm")
        processor = sentencepiece.SentencePieceProcessor(model_file=str(model))
        pieces |= dict.fromkeys(processor.id_to_piece(id) for id in range(3, len(processor)))
    pieces |= dict.fromkeys(f"▁unmet{number}" for number in range(ENTRIES - 1 - len(pieces)))
    (folder / "vocab.json").write_text(json.dumps({piece: id for id, piece in enumerate([*pieces, "<pad>"])}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "MarianTokenizer"}))
    torch.manual_seed(1)
    config = MarianConfig(
        vocab_size=ENTRIES, d_model=512, encoder_layers=6, decoder_layers=6, encoder_ffn_dim=2048, decoder_ffn_dim=2048,
        encoder_attention_heads=8, decoder_attention_heads=8, activation_function="swish", scale_embedding=True,
        max_position_embeddings=512, pad_token_id=ENTRIES - 1, decoder_start_token_id=ENTRIES - 1, eos_token_id=0,
        forced_eos_token_id=0, static_position_embeddings=True, init_std=0.05,
    )  # fmt: skip
    MarianMTModel(config).save_pretrained(folder)


def nmtkit_system(stack: ExitStack, path: Path, precision: str, max_tokens: int, lines: list[str]) -> System:
    translator = Translator.load(path, precision=precision)  # type: ignore[arg-type]
    translator.max_tokens = max_tokens
    options = SearchOptions(beam=BEAM, min_len=STEPS - 1, max_len_a=0, max_len_b=STEPS - 1, lenpen=0)
    decode = stack.enter_context(worker_processes(translator, options, CORES))
    requests, pipeline = [Request(line) for line in lines], translator.pipeline(options)
    return lambda: [found.text for found in translator.run([requests], pipeline, decode, CORES)]


def ctranslate2_system(folder: Path, compute_type: str, batch: int, lines: list[str]) -> System:
    import ctranslate2

    translator = ctranslate2.Translator(str(folder), inter_threads=CORES, intra_threads=1, compute_type=compute_type)
    source, target = (
        sentencepiece.SentencePieceProcessor(model_file=str(folder / f"{side}.model")) for side in ("source", "target")
    )

    def run() -> list[str]:
        found = translator.translate_batch(
            source.encode(lines, out_type=str), beam_size=BEAM, max_batch_size=batch, length_penalty=0,
            min_decoding_length=STEPS - 1, max_decoding_length=STEPS,
        )  # fmt: skip
        return [target.decode(result.hypotheses[0][: STEPS - 1]) for result in found]

    return run


def transformers_system(folder: Path, precision: str, batch: int, lines: list[str]) -> System:
    from transformers import MarianMTModel, MarianTokenizer

    tokenizer, model = MarianTokenizer.from_pretrained(folder), MarianMTModel.from_pretrained(folder).eval()
    if precision == "bf16":
        model = model.bfloat16()
    elif precision == "int8":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch would have us use torchao
            model = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, torch.qint8)
    order = sorted(range(len(lines)), key=lambda line: len(lines[line]))

    @torch.inference_mode()
    def run() -> list[str]:
        torch.set_num_threads(CORES)
        found: dict[int, str] = {}
        for start in range(0, len(order), batch):
            chosen = order[start : start + batch]
            source = tokenizer([lines[line] for line in chosen], return_tensors="pt", padding=True)
            output = model.generate(
                **source, num_beams=BEAM, do_sample=False, length_penalty=0.0, min_new_tokens=STEPS - 1,
                max_new_tokens=STEPS, bad_words_ids=[[1], [ENTRIES - 1]],
            )  # fmt: skip
            found |= dict(zip(chosen, tokenizer.batch_decode(output, skip_special_tokens=True), strict=True))
        return [found[line] for line in range(len(lines))]

    return run


def systems(arguments: argparse.Namespace, stack: ExitStack, lines: list[str]) -> Iterator[tuple[str, System]]:
    """Yields each system with its name."""
    original, imported = arguments.folder / "opus-mt", arguments.folder / "imported.pt"
    if not original.is_dir():
        text = [Path(f"{arguments.text}.{language}") for language in (arguments.source_lang, arguments.target_lang)]
        write_model(original, text)
    if not imported.is_file():
        checkpoint.save(imported, huggingface.load(original))
    makers: dict[str, Callable[..., System]] = {}
    for precision in ("fp32", "bf16", "int8"):
        makers[f"nmtkit {precision}"] = partial(nmtkit_system, stack, imported, precision, lines=lines)
    for precision, quantization in (("fp32", "float32"), ("int8", "int8")):
        folder = arguments.folder / f"ctranslate2-{quantization}"
        if not folder.is_dir():
            ctranslate2_export.save(imported, folder, quantization)  # type: ignore[arg-type]
        makers[f"CTranslate2 {precision}"] = partial(ctranslate2_system, folder, quantization, lines=lines)
    for precision in ("fp32", "bf16", "int8"):
        makers[f"transformers {precision}"] = partial(transformers_system, original, precision, lines=lines)
    for name, maker in makers.items():
        if arguments.only and name not in arguments.only.split(","):
            continue
        if name.startswith("nmtkit"):
            for max_tokens in arguments.max_tokens:
                yield f"{name}, batches of {max_tokens} tokens", maker(max_tokens=max_tokens)
            continue
        for batch in arguments.batches or [BATCHES[name.split()[0]]]:
            yield f"{name}, batches of {batch}", maker(batch=batch)


def show(seconds: dict[str, list[float]], tokens: int) -> None:
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    best: dict[str, float] = {}
    for name, value in medians.items():
        system = name.split(",")[0]
        best[system] = min(value, best.get(system, value))
    for name, value in medians.items():
        precision = name.split(",")[0].split()[1]
        ratio = value / best[f"nmtkit {precision}"] if f"nmtkit {precision}" in best else float("nan")
        print(
            f"{name:40}{tokens / value:>8,.0f} tok/s   nmtkit {precision} is {ratio:.2f} times as fast   "
            f"{[round(second, 2) for second in seconds[name]]}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", required=True, help="text for the SentencePiece models, without its language")
    parser.add_argument("-s", "--source-lang", required=True)
    parser.add_argument("-t", "--target-lang", required=True)
    parser.add_argument("--source", type=Path, required=True, help="lines to translate")
    parser.add_argument("--sentences", type=int, default=128, help="of them, drawn evenly")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", type=lambda text: [int(size) for size in text.split(",")])
    parser.add_argument("--max-tokens", type=lambda text: [int(size) for size in text.split(",")], default=[2048])
    parser.add_argument("--only", help="comma-separated names of systems")
    parser.add_argument("--folder", type=Path, default=Path("imported-speed"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # before anything is computed: nmtkit's workers are forked
    lines = arguments.source.read_text().splitlines()
    lines = [lines[number * len(lines) // arguments.sentences] for number in range(arguments.sentences)]
    kept = arguments.folder / "seconds.json"
    seconds: dict[str, list[float]] = json.loads(kept.read_text()) if kept.is_file() else {}
    with ExitStack() as stack:
        running = dict(systems(arguments, stack, lines))
        outputs = {name: run() for name, run in running.items()}  # warm
        for _ in range(arguments.rounds):
            for name, run in running.items():
                started = time.perf_counter()
                run()
                seconds.setdefault(name, []).append(time.perf_counter() - started)
            kept.write_text(json.dumps(seconds))
    first = next(iter(outputs.values()))
    for name, found in outputs.items():
        same = sum(one == other for one, other in zip(first, found, strict=True))
        print(f"{name:40}{same} of {len(lines)} lines translated as by {next(iter(outputs))}")
    show({name: values for name, values in seconds.items() if values}, STEPS * len(lines))


if __name__ == "__main__":
    main()
