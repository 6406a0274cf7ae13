"""Compares nmtkit's engines on one thread of a CPU with CTranslate2 and transformers, on the same weights.

    python benchmarks/engines.py --checkpoint best.pt --lines test.en       # needs nmtkit[export,numba], transformers
    python benchmarks/engines.py --parts base opus --precisions int8 --only numba,CTranslate2

trained   A checkpoint on real lines.
base      transformer_base with random weights. Sentences have 8 to 19 pieces, and each search is forced to 15 steps.
opus      The same for a model of OPUS-MT's shape (6 + 6 layers 512 wide, swish, 58,101 entries, two SentencePiece
          models), which transformers saves and `nmtkit import` reads. Only this part has transformers, whose int8 is
          torch's dynamic quantization of all linear layers.

For each number of lines n, a system translates n lines at a time, from text to text. Scores are not normalised by
length (`--lenpen 0`), so that all systems search alike. CTranslate2 and transformers have batches of 32 lines, which
is their fastest size here. Models are loaded before the clock starts. A row has the medians of all rounds; the last
columns are times relative to the first system. `--only` chooses systems.
"""

import argparse
import json
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import ctranslate2
import numpy as np
import sentencepiece
import torch
from harness import Report, Row, chosen, in_turns, parser

from nmtkit.data import checkpoint_file
from nmtkit.data.tokenizers.spm_training import train_model
from nmtkit.data.tokenizers.tokenizer import Tokenizer
from nmtkit.models import building
from nmtkit.models.architectures import ARCHITECTURES
from nmtkit.models.formats import ctranslate2 as ctranslate2_export
from nmtkit.models.formats import huggingface
from nmtkit.translation.search.options import SearchOptions
from nmtkit.translation.translator import Translator

NUMBERS, BEAMS, STEPS, BATCH = (1, 4, 16, 64, 256), (1, 4), 14, 32  # STEPS does not count the step of eos
LINES = 64  # smallest number of lines in a round
ENTRIES, PIECES = 58_101, 16_000  # sizes of OPUS-MT's vocabulary and of each SentencePiece model
# Random weights repeat pieces: without `keep_loops`, each line would be searched twice.
FORCED = SearchOptions(min_len=STEPS, max_len_a=0.0, max_len_b=STEPS, keep_loops=True)
COMPUTE_TYPES = {"fp32": "float32", "int8": "int8"}
Translate = Callable[[list[str]], list[str]]  # translates the lines of one call
Load = Callable[[int], Translate]  # beam size -> a system


def made_up_text() -> list[str]:
    """Returns lines of nine made-up words of six letters."""
    generator = np.random.default_rng(0)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    words = sorted({"".join(generator.choice(letters, 6)) for _ in range(20_000)})
    return [" ".join(words[start : start + 9]) for start in range(0, len(words), 9)]


def base_model(folder: Path) -> Path:
    """Returns a checkpoint of transformer_base with random weights and a vocabulary of 10,000 made-up pieces."""
    path = folder / "base-10000.pt"
    if not path.exists():
        tokenizer = Tokenizer(train_model(made_up_text(), 10_000))
        torch.manual_seed(0)
        preset = ARCHITECTURES["transformer_base"].preset
        model = building.build("transformer_base", preset, building.vocabulary_of(tokenizer))
        checkpoint_file.save(path, building.to_checkpoint(model, "transformer_base", preset, tokenizer, [], 0))
    return path


def opus_model(folder: Path) -> Path:
    """Returns a checkpoint imported from a transformers model with random weights, whose folder lies next to it."""
    path, original = folder / "opus.pt", folder / "opus"
    if path.exists():
        return path
    from transformers import MarianConfig, MarianMTModel

    original.mkdir(exist_ok=True)
    text = original / "text.txt"
    text.write_text("\n".join(made_up_text()))
    pieces: dict[str, None] = dict.fromkeys(["</s>", "<unk>"])
    for side in ("source", "target"):
        sentencepiece.SentencePieceTrainer.train(
            input=str(text), model_prefix=str(original / side), vocab_size=PIECES, minloglevel=2, model_type="bpe"
        )
        model = (original / f"{side}.model").rename(original / f"{side}.spm")
        processor = sentencepiece.SentencePieceProcessor(model_file=str(model))
        pieces |= dict.fromkeys(processor.id_to_piece(id) for id in range(3, len(processor)))
    pieces |= dict.fromkeys(f"▁unmet{number}" for number in range(ENTRIES - 1 - len(pieces)))
    (original / "vocab.json").write_text(json.dumps({piece: id for id, piece in enumerate([*pieces, "<pad>"])}))
    (original / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "MarianTokenizer"}))
    torch.manual_seed(1)
    config = MarianConfig(
        vocab_size=ENTRIES, d_model=512, encoder_layers=6, decoder_layers=6, encoder_ffn_dim=2048,
        decoder_ffn_dim=2048, encoder_attention_heads=8, decoder_attention_heads=8, activation_function="swish",
        scale_embedding=True, max_position_embeddings=512, pad_token_id=ENTRIES - 1, eos_token_id=0,
        decoder_start_token_id=ENTRIES - 1, forced_eos_token_id=0, static_position_embeddings=True, init_std=0.05,
    )  # fmt: skip
    MarianMTModel(config).save_pretrained(original)
    checkpoint_file.save(path, huggingface.load(original))
    return path


def made_lines(path: Path) -> list[str]:
    """Returns lines of 8 to 19 random pieces of the vocabulary of a model."""
    tokenizer = building.from_checkpoint(path)[1]
    generator = np.random.default_rng(1)
    pieces = min(tokenizer.source_size, PIECES)
    ids = [generator.integers(300, pieces, size) for size in generator.integers(8, 20, max(NUMBERS))]
    return ["".join(tokenizer.source_pieces(row.tolist())).replace("▁", " ").strip() for row in ids]


# --- systems ----------------------------------------------------------------------------------------------------------


def nmtkit_loader(path: Path, engine: str, precision: Any, forced: bool) -> Load:
    translator = Translator.load(path, engine=engine, precision=precision)
    options = FORCED if forced else SearchOptions()

    def load(beam: int) -> Translate:
        pipeline = translator.pipeline(replace(options, beam=beam, lenpen=0))
        return lambda lines: [line.text for line in translator.stream(lines, pipeline)]

    return load


def ctranslate2_loader(path: Path, precision: str, forced: bool) -> Load:
    """Returns CTranslate2 with SentencePiece, which encodes and decodes all lines of a call together."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "model"
        ctranslate2_export.save(path, folder, "int8" if precision == "int8" else "float32")
        kind = COMPUTE_TYPES[precision]
        translator = ctranslate2.Translator(str(folder), inter_threads=1, intra_threads=1, compute_type=kind)
        source, target = (
            sentencepiece.SentencePieceProcessor(model_file=str(next(folder.glob(f"[{side}j]*.model"))))
            for side in "st"
        )
    options = {"length_penalty": 0, "max_batch_size": BATCH}
    options |= {"min_decoding_length": STEPS, "max_decoding_length": STEPS} if forced else {}

    def translate(beam: int, lines: list[str]) -> list[str]:
        results = translator.translate_batch(source.encode(lines, out_type=str), beam_size=beam, **options)
        return [str(text) for text in target.decode([result.hypotheses[0] for result in results])]

    return lambda beam: partial(translate, beam)


def transformers_loader(folder: Path, precision: str) -> Load:
    from transformers import MarianMTModel, MarianTokenizer

    tokenizer, model = MarianTokenizer.from_pretrained(folder), MarianMTModel.from_pretrained(folder).eval()
    if precision == "int8":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch recommends torchao
            model = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, torch.qint8)

    @torch.inference_mode()
    def translate(beam: int, lines: list[str]) -> list[str]:
        order = sorted(range(len(lines)), key=lambda line: len(lines[line]))
        texts: dict[int, str] = {}
        for start in range(0, len(order), BATCH):
            batch = order[start : start + BATCH]
            source = tokenizer([lines[line] for line in batch], return_tensors="pt", padding=True)
            output = model.generate(
                **source, num_beams=beam, do_sample=False, length_penalty=0.0, min_new_tokens=STEPS,
                max_new_tokens=STEPS, bad_words_ids=[[1], [ENTRIES - 1]],
            )  # fmt: skip
            texts |= dict(zip(batch, tokenizer.batch_decode(output, skip_special_tokens=True), strict=True))
        return [texts[line] for line in range(len(lines))]

    return lambda beam: partial(translate, beam)


# --- measurement ------------------------------------------------------------------------------------------------------


def measured(arguments: argparse.Namespace, part: str, path: Path, lines: list[str], report: Report) -> None:
    """Measures all systems in all precisions, with each beam and each number of lines."""
    least = 4 if arguments.quick else LINES
    for precision in arguments.precisions:
        makers: dict[str, Callable[[], Load]] = {}
        for engine in ("numba", "torch"):
            makers[engine] = partial(nmtkit_loader, path, engine, precision, part != "trained")
        makers["CTranslate2"] = partial(ctranslate2_loader, path, precision, part != "trained")
        if part == "opus":
            makers["transformers"] = partial(transformers_loader, path.with_suffix(""), precision)
        loaders = {name: make() for name, make in chosen(makers, arguments.only).items()}
        rows: list[Row] = []
        for beam in BEAMS:
            for size in arguments.numbers:
                text = lines[: max(size, least)]
                calls = [text[start : start + size] for start in range(0, len(text), size)]
                systems = {name: partial(all_calls, load(beam), calls) for name, load in loaders.items()}
                timings = in_turns(systems, arguments.rounds)
                medians = {
                    name: 1000 * float(np.median(timing.seconds)) / len(calls) for name, timing in timings.items()
                }
                first, *others = medians
                ratios = {f"{name} / {first}": medians[name] / medians[first] for name in others}
                rows.append({"beam": beam, "n": size} | medians | ratios)
        report.table(f"{path.stem}, {precision}, one thread: milliseconds a call", rows)


def all_calls(translate: Translate, calls: list[list[str]]) -> list[str]:
    return [text for call in calls for text in translate(call)]


def main() -> None:
    flags = parser(__doc__, ["trained", "base", "opus"], rounds=5, threads=1)
    flags.add_argument("--checkpoint", type=Path, help="for the part `trained`")
    flags.add_argument("--lines", type=Path, help="source lines for the part `trained`")
    flags.add_argument("--precisions", nargs="+", choices=list(COMPUTE_TYPES), default=list(COMPUTE_TYPES))
    flags.add_argument("--numbers", nargs="+", type=int, default=list(NUMBERS), help="numbers of lines at a time")
    arguments = flags.parse_args()
    if arguments.quick:
        arguments.rounds, arguments.numbers = 1, [1, 4]
    torch.set_num_threads(arguments.threads)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    report = Report(arguments)
    if "trained" in arguments.parts:
        if arguments.checkpoint is None or arguments.lines is None:
            flags.error("the part `trained` needs --checkpoint and --lines")
        lines = arguments.lines.read_text(encoding="utf-8").split("\n")[:-1]
        measured(arguments, "trained", arguments.checkpoint, lines[:: max(1, len(lines) // max(NUMBERS))], report)
    for part, make in (("base", base_model), ("opus", opus_model)):
        if part in arguments.parts:
            path = make(arguments.folder)
            measured(arguments, part, path, made_lines(path), report)


if __name__ == "__main__":
    main()
