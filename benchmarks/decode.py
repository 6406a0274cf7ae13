"""Decoding: how fast is nmtkit beside other toolkits, with the same weights and the same search, in one precision?

    python benchmarks/decode.py --text m30k                                     # needs nmtkit[export], transformers 5
    python benchmarks/decode.py --text m30k --parts commands --marian /tmp/marian/bin/pymarian

base      transformer_base with random weights beside CTranslate2: sentences of about 15 pieces, 15 forced steps.
trained   A transformer_tiny (`--checkpoint`, or one that is trained first) on the test set beside CTranslate2; a token
          is a piece of the reference, and that the model is the same shows in BLEU.
imported  A model of the shape of OPUS-MT (6 + 6 layers 512 wide, swish, 58,101 entries, two SentencePiece models),
          saved by transformers with random weights and read by `nmtkit import`, beside transformers and CTranslate2;
          15 forced steps. The int8 of transformers is torch's dynamic quantization of all linear layers.
commands  Whole commands beside Marian and CTranslate2. A command translates the test set once, and three times over:
          the difference gives the speed without the start.

The beam is 4 and nothing rewards length (`--lenpen 0`), so that the search is the same. nmtkit has two processes of one
thread, CTranslate2 two translators of one thread, transformers and Marian two threads: their fastest here. nmtkit has
its default batches, CTranslate2 and transformers 32 sentences, Marian 64, which are their fastest here. In the first
three parts models are loaded and processes run before the clock starts.
"""

import argparse
import json
import statistics
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import sentencepiece
import torch
from harness import Report, Row, Timing, Workspace, busy_cores, chosen, command, in_turns, parser, speeds

from nmtkit.data import checkpoint_file
from nmtkit.data.dataset.binarized import Dataset
from nmtkit.models.formats import ctranslate2 as ctranslate2_export
from nmtkit.models.formats import huggingface, marian_export
from nmtkit.scoring.metrics import score
from nmtkit.translation.parallel import worker_processes
from nmtkit.translation.search.options import SearchOptions
from nmtkit.translation.search.types import Request
from nmtkit.translation.translator import Translator

BEAM, STEPS, CORES, BATCH = 4, 15, 2, 32  # STEPS: of forced outputs, the end of the sentence included
PRECISIONS = {"fp32": "float32", "bf16": "bfloat16", "int8": "int8"}  # ours -> CTranslate2's compute type
ENTRIES = 58_101  # of OPUS-MT's vocabulary
System = Callable[[], list[str]]  # translates all lines

# --- systems ----------------------------------------------------------------------------------------------------------


def nmtkit_system(stack: ExitStack, path: Path, precision: Any, lines: list[str], forced: bool) -> System:
    translator = Translator.load(path, precision=precision)
    steps: dict[str, int] = {"min_len": STEPS - 1, "max_len_a": 0, "max_len_b": STEPS - 1} if forced else {}
    options = SearchOptions(beam=BEAM, lenpen=0, **steps)
    decoder = stack.enter_context(
        worker_processes(translator, options, CORES, partial(Translator.load, path, precision=precision))
    )
    requests, pipeline = [Request(line) for line in lines], translator.pipeline(options)
    return lambda: [result.text for result in translator.run([requests], pipeline, decoder, CORES)]


def ctranslate2_system(path: Path, precision: str, lines: list[str], forced: bool) -> System:
    import ctranslate2

    folder = path.with_name(f"{path.stem}-{precision}-ctranslate2")
    if not folder.exists():
        ctranslate2_export.save(path, folder, "int8" if precision == "int8" else "float32")
    compute_type = PRECISIONS[precision]
    translator = ctranslate2.Translator(str(folder), inter_threads=CORES, intra_threads=1, compute_type=compute_type)
    source, target = (
        sentencepiece.SentencePieceProcessor(model_file=str(next(folder.glob(f"[{side[0]}j]*.model"))))
        for side in ("source", "target")
    )
    steps = {"min_decoding_length": STEPS, "max_decoding_length": STEPS} if forced else {}

    def run() -> list[str]:
        pieces = source.encode(lines, out_type=str)
        results = translator.translate_batch(pieces, beam_size=BEAM, max_batch_size=BATCH, length_penalty=0, **steps)
        return [target.decode(result.hypotheses[0]) for result in results]

    return run


def transformers_system(folder: Path, precision: str, lines: list[str]) -> System:
    from transformers import MarianMTModel, MarianTokenizer

    tokenizer, model = MarianTokenizer.from_pretrained(folder), MarianMTModel.from_pretrained(folder).eval()
    if precision == "bf16":
        model = model.bfloat16()
    elif precision == "int8":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch recommends torchao
            model = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, torch.qint8)
    order = sorted(range(len(lines)), key=lambda line: len(lines[line]))

    @torch.inference_mode()
    def run() -> list[str]:
        torch.set_num_threads(CORES)
        texts: dict[int, str] = {}
        for start in range(0, len(order), BATCH):
            batch = order[start : start + BATCH]
            source = tokenizer([lines[line] for line in batch], return_tensors="pt", padding=True)
            output = model.generate(
                **source, num_beams=BEAM, do_sample=False, length_penalty=0.0, min_new_tokens=STEPS - 1,
                max_new_tokens=STEPS, bad_words_ids=[[1], [ENTRIES - 1]],
            )  # fmt: skip
            texts |= dict(zip(batch, tokenizer.batch_decode(output, skip_special_tokens=True), strict=True))
        return [texts[line] for line in range(len(lines))]

    return run


def both(stack: ExitStack, path: Path, lines: list[str], forced: bool) -> dict[str, Callable[[], System]]:
    """Returns functions that make nmtkit and CTranslate2, in the precisions that each of them has here."""
    import ctranslate2

    makers: dict[str, Callable[[], System]] = {}
    for precision in PRECISIONS:
        makers[f"nmtkit {precision}"] = partial(nmtkit_system, stack, path, precision, lines, forced)
    for precision, compute_type in PRECISIONS.items():
        if compute_type in ctranslate2.get_supported_compute_types("cpu"):
            makers[f"CTranslate2 {precision}"] = partial(ctranslate2_system, path, precision, lines, forced)
    return makers


def timed(arguments: argparse.Namespace, makers: dict[str, Callable[[], System]]) -> dict[str, Timing]:
    return in_turns({name: make() for name, make in chosen(makers, arguments.only).items()}, arguments.rounds)


# --- parts ------------------------------------------------------------------------------------------------------------


def base(arguments: argparse.Namespace, workspace: Workspace, report: Report) -> None:
    tokenizer, lines = Dataset.open(workspace.data).tokenizer, workspace.lines("test", 0)
    lengths = [len(ids) for ids in tokenizer.encode_source(lines).split()]
    middle = sorted(range(len(lines)), key=lambda line: abs(lengths[line] - STEPS))[: arguments.sentences]
    path = workspace.untrained("transformer_tiny" if arguments.quick else "transformer_base")
    with ExitStack() as stack:
        timings = timed(arguments, both(stack, path, [lines[line] for line in middle], True))
    title = f"{path.stem}, {len(middle)} sentences, {STEPS} forced steps"
    report.table(title, speeds(timings, STEPS * len(middle)))


def checkpoint_of(arguments: argparse.Namespace, workspace: Workspace) -> Path:
    updates = 2 if arguments.quick else 900
    flags = f"--arch transformer_tiny --positions sinusoidal_fairseq --max-update {updates} --threads 2"
    return arguments.checkpoint or workspace.trained("tiny", flags)


def with_bleu(rows: list[Row], outputs: dict[str, list[str]], references: list[str]) -> list[Row]:
    """Adds BLEU, and the number of lines that are translated as by the first system."""
    first = next(iter(outputs.values()))
    for row in rows:
        texts = outputs[row["system"]]
        row["BLEU"] = score(texts, [references])[0].value
        row["same as the first"] = sum(text == other for text, other in zip(texts, first, strict=True))
    return rows


def trained(arguments: argparse.Namespace, workspace: Workspace, report: Report) -> None:
    path, lines, references = checkpoint_of(arguments, workspace), *(workspace.lines("test", side) for side in (0, 1))
    tokens = sum(map(len, Dataset.open(workspace.data).tokenizer.encode_target(references).split()))
    with ExitStack() as stack:
        timings = timed(arguments, both(stack, path, lines, False))
    outputs = {name: timing.output for name, timing in timings.items()}
    report.table(f"trained model, {len(lines)} sentences", with_bleu(speeds(timings, tokens), outputs, references))


def opus_model(folder: Path, text: Sequence[Path], pieces_per_side: int, small: bool) -> Path:
    """Writes a folder as OPUS-MT has it, with random weights."""
    from transformers import MarianConfig, MarianMTModel

    folder.mkdir(parents=True)
    pieces: dict[str, None] = dict.fromkeys(["</s>", "<unk>"])
    for side, path in zip(("source", "target"), text, strict=True):
        sentencepiece.SentencePieceTrainer.train(
            input=str(path), model_prefix=str(folder / side), vocab_size=pieces_per_side, hard_vocab_limit=False,
            minloglevel=2,
        )  # fmt: skip
        model = (folder / f"{side}.model").rename(folder / f"{side}.spm")
        processor = sentencepiece.SentencePieceProcessor(model_file=str(model))
        pieces |= dict.fromkeys(processor.id_to_piece(id) for id in range(3, len(processor)))
    pieces |= dict.fromkeys(f"▁unmet{number}" for number in range(ENTRIES - 1 - len(pieces)))
    (folder / "vocab.json").write_text(json.dumps({piece: id for id, piece in enumerate([*pieces, "<pad>"])}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "MarianTokenizer"}))
    torch.manual_seed(1)
    width, layers = (32, 1) if small else (512, 6)
    config = MarianConfig(
        vocab_size=ENTRIES, d_model=width, encoder_layers=layers, decoder_layers=layers, encoder_ffn_dim=4 * width,
        decoder_ffn_dim=4 * width, encoder_attention_heads=8, decoder_attention_heads=8, activation_function="swish",
        scale_embedding=True, max_position_embeddings=512, pad_token_id=ENTRIES - 1, eos_token_id=0,
        decoder_start_token_id=ENTRIES - 1, forced_eos_token_id=0, static_position_embeddings=True, init_std=0.05,
    )  # fmt: skip
    MarianMTModel(config).save_pretrained(folder)
    return folder


def imported(arguments: argparse.Namespace, workspace: Workspace, report: Report) -> None:
    original, path = workspace.folder / "opus-mt", workspace.folder / "imported.pt"
    if not path.exists():
        text = [workspace.file("train", side) for side in (0, 1)]
        opus_model(original, text, 400 if arguments.quick else 16_000, arguments.quick)
        checkpoint_file.save(path, huggingface.load(original))
    lines = workspace.lines("test", 0)
    count = min(arguments.sentences, len(lines))
    lines = [lines[number * len(lines) // count] for number in range(count)]
    with ExitStack() as stack:
        makers = both(stack, path, lines, True)
        for precision in PRECISIONS:
            makers[f"transformers {precision}"] = partial(transformers_system, original, precision, lines)
        timings = timed(arguments, makers)
    report.table(f"model of OPUS-MT's shape, {count} sentences", speeds(timings, STEPS * count))


CTRANSLATE2 = """\
import sys
import ctranslate2, sentencepiece
folder, compute_type, source, output = sys.argv[1:]
pieces = sentencepiece.SentencePieceProcessor(model_file=folder + "/joint.model")
translator = ctranslate2.Translator(folder, inter_threads=2, intra_threads=1, compute_type=compute_type)
lines = pieces.encode(open(source).read().splitlines(), out_type=str)
results = translator.translate_batch(lines, beam_size=4, max_batch_size=32, length_penalty=0)
open(output, "w").writelines(pieces.decode(result.hypotheses[0]) + "\\n" for result in results)
"""
MARIAN_FLAGS = "--beam-size 4 --normalize 0 --cpu-threads 2 --mini-batch 64 --maxi-batch 100 --maxi-batch-sort src"
MARIAN = {"Marian fp32": "float32", "Marian intgemm int8": "intgemm8avx512", "Marian FBGEMM int8": "packed8avx512"}
REPEATS = 3


def commands(arguments: argparse.Namespace, workspace: Workspace, report: Report) -> None:
    path, folder = checkpoint_of(arguments, workspace), workspace.folder
    lines, references = (workspace.lines("test", side) for side in (0, 1))
    output = folder / "output.txt"
    systems: dict[str, Callable[[Path], tuple[list[str], bool]]] = {}  # source -> command, and whether it reads stdin
    for precision in PRECISIONS:
        flags = ["--path", str(path), "--beam", "4", "--lenpen", "0", "--precision", precision, "--workers", "2"]
        own = [sys.executable, "-m", "nmtkit", "generate", *flags]
        systems[f"nmtkit {precision}"] = lambda source, own=own: (own, True)
    for precision in ("fp32", "int8"):
        model = folder / f"commands-{precision}-ctranslate2"
        if not model.exists():
            ctranslate2_export.save(path, model, "int8" if precision == "int8" else "float32")
        theirs = [sys.executable, "-c", CTRANSLATE2, str(model), PRECISIONS[precision]]
        systems[f"CTranslate2 {precision}"] = lambda source, theirs=theirs: (
            [*theirs, str(source), str(output)], False
        )  # fmt: skip
    if arguments.marian:
        model = folder / "marian"
        if not model.exists():
            marian_export.save(path, model)
        for name, gemm in MARIAN.items():
            converted = model / f"{gemm}.bin"
            files = ["-f", str(model / "model.npz"), "-t", str(converted), "--gemm-type", gemm]
            command([arguments.marian, "convert", *files])
            marian = [arguments.marian, "decode", "-c", str(model / "decoder.yml"), "-m", str(converted)]
            marian += [*MARIAN_FLAGS.split(), "-w", "500", "--quiet", "--quiet-translation", "-o", str(output)]
            systems[name] = lambda source, marian=marian: ([*marian, "-i", str(source)], False)
    sources = {}
    for count in (1, REPEATS):
        sources[count] = folder / f"test-{count}.txt"
        sources[count].write_text("".join(f"{line}\n" for line in lines * count))
    seconds: dict[tuple[str, int], list[float]] = {}
    outputs = {}
    for _ in range(arguments.rounds):
        for name, make in chosen(systems, arguments.only).items():
            for count, source in sources.items():
                words, reads_stdin = make(source)
                files = {"stdin": source, "stdout": output} if reads_stdin else {}
                done = command(words, **files, OMP_NUM_THREADS="2")  # type: ignore[arg-type]
                seconds.setdefault((name, count), []).append(done.seconds)
            outputs[name] = output.read_text().splitlines()[: len(lines)]
    tokens = sum(map(len, Dataset.open(workspace.data).tokenizer.encode_target(references).split()))
    rows: list[Row] = []
    for name in outputs:
        once, often = (statistics.median(seconds[name, count]) for count in (1, REPEATS))
        steady = tokens * (REPEATS - 1) / max(0.01, often - once)
        rows.append({"system": name, "seconds": once, "tok/s": tokens / once, "tok/s without start": steady})
    report.table(f"whole commands, {len(lines)} sentences", with_bleu(rows, outputs, references))


def main() -> None:
    parts = {"base": base, "trained": trained, "imported": imported, "commands": commands}
    flags = parser(__doc__, list(parts))
    flags.add_argument("--checkpoint", type=Path, help="of the parts trained and commands; default: one is trained")
    flags.add_argument("--sentences", type=int, default=128, help="of the parts base and imported")
    flags.add_argument("--marian", help="the command pymarian of its environment")
    arguments = flags.parse_args()
    if arguments.quick:
        arguments.sentences, arguments.rounds = 4, 1
    torch.set_num_threads(1)  # before anything is computed: the processes of nmtkit are forked
    workspace, report = Workspace(arguments), Report(arguments)
    with busy_cores(arguments.busy):
        for part in arguments.parts:
            parts[part](arguments, workspace, report)


if __name__ == "__main__":
    main()
