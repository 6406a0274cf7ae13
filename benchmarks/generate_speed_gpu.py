"""nmtkit's decoding speed on a GPU: slots with CUDA graphs, slots without, batch by batch, and CTranslate2 in float16.

    python benchmarks/generate_speed_gpu.py [--models base big] [--vocabulary 37000 10000] [--rounds 3] [--output FILE]
    python benchmarks/generate_speed_gpu.py --device cpu --models tiny --vocabulary 500 --sentences 40    # a smoke test

Random weights, and sources of random ids whose lengths are those of a news text (log-normal, 28 pieces at the mean).
Such a model hardly ever ends by itself, so a translation may be, and is, as long as its source: as in life, sentences
of many lengths end at many times. Beam 4, bf16 (fp32 on a CPU). Systems take turns, round by round; of each the median
round counts.
CTranslate2, if it is installed, gets the same weights and lengths: a call for each length, all of them in its queue.
"""

import argparse
import json
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from turns import in_turns

from nmtkit import export
from nmtkit.architectures import ARCHITECTURES, Architecture, Vocabulary
from nmtkit.data.tokenizer import EOS
from nmtkit.generation.continuous_batching import ContinuousBatching
from nmtkit.generation.decoding import Sentence, beam_search
from nmtkit.generation.graph_search import Eager
from nmtkit.generation.options import SearchOptions
from nmtkit.generation.translator import prepare
from nmtkit.packed import Packed

OPTIONS = SearchOptions(beam=4, max_len_a=1.0, max_len_b=0)
BATCH = 16384  # source tokens, of the search batch by batch and of CTranslate2
System = Callable[[], int]  # decodes all sentences; returns the number of output tokens, eos included


def random_sentences(number: int, vocabulary: int) -> list[Sentence]:
    """Longest first, as a translator sorts them."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.empty(number).log_normal_(3.2, 0.55, generator=generator).round().long().clamp(1, 200)
    ordered = lengths.sort(descending=True).values.tolist()
    return [Sentence([*torch.randint(3, vocabulary, (n,), generator=generator).tolist(), EOS]) for n in ordered]


def batches(sentences: list[Sentence]) -> Iterator[list[Sentence]]:
    batch: list[Sentence] = []
    for sentence in sentences:
        if batch and (len(batch) + 1) * len(batch[0].ids) > BATCH:
            yield batch
            batch = []
        batch.append(sentence)
    yield batch


def batch_by_batch(model: Architecture, sentences: list[Sentence], device: torch.device) -> System:
    def run() -> int:
        tokens = 0
        for batch in batches(sentences):
            found = beam_search([model], Packed.from_lists([sentence.ids for sentence in batch], device), OPTIONS)
            tokens += sum(len(hypotheses[0].tokens) + 1 for hypotheses in found)
        return tokens

    return run


def slots(model: Architecture, sentences: list[Sentence], device: torch.device, number: int, graphs: bool) -> System:
    def never(batch: list[Sentence]) -> list[list[object]]:
        raise AssertionError("no sentence has constraints")

    search = ContinuousBatching([model], OPTIONS, number, never, device, None if graphs else Eager)

    def run() -> int:
        return sum(
            len(hypotheses[0].tokens) + 1 for _, found in search.decode(batches(sentences)) for hypotheses in found
        )

    return run


def ctranslate2_float16(model: Architecture, vocabulary: int, sentences: list[Sentence], folder: Path) -> System:
    import ctranslate2
    from ctranslate2.specs import TransformerSpec

    config = model.config
    spec = TransformerSpec.from_config((config.encoder_layers, config.decoder_layers), config.heads)
    pieces = ["<unk>", "<s>", "</s>", *(f"piece{id}" for id in range(3, vocabulary))]
    spec.config.add_source_eos = True
    spec.config.unk_token, spec.config.bos_token, spec.config.eos_token = pieces[:3]
    spec.config.decoder_start_token = "<s>"
    spec.register_source_vocabulary(pieces)
    spec.register_target_vocabulary(pieces)
    export._fill(spec, model)
    spec.validate()
    spec.optimize(quantization="float16")
    spec.save(str(folder))
    translator = ctranslate2.Translator(str(folder), device="cuda", compute_type="float16")
    by_length: dict[int, list[list[str]]] = defaultdict(list)
    for sentence in sentences:
        by_length[len(sentence.ids)].append([pieces[id] for id in sentence.ids[:-1]])

    def run() -> int:
        waiting = []
        for length, group in by_length.items():  # longest first
            limits = {
                "min_decoding_length": length,
                "max_decoding_length": length,
            }  # without eos: as many steps as ours
            settings = {
                "max_batch_size": BATCH,
                "batch_type": "tokens",
                "asynchronous": True,
                "beam_size": OPTIONS.beam,
            }
            waiting += translator.translate_batch(group, **settings, **limits)
        return sum(len(job.result().hypotheses[0]) for job in waiting)

    return run


def systems_of(name: str, vocabulary: int, arguments: argparse.Namespace, folder: Path) -> dict[str, System]:
    torch.manual_seed(1)
    device = torch.device(arguments.device)
    entry = ARCHITECTURES[f"transformer_{name}"]
    model = entry.factory(entry.preset, Vocabulary(source=vocabulary, target=vocabulary, joint=True)).eval()
    sentences = random_sentences(arguments.sentences, vocabulary)
    systems: dict[str, System] = {}
    if device.type == "cuda":
        try:
            systems["CTranslate2 float16"] = ctranslate2_float16(model, vocabulary, sentences, folder)
        except (ImportError, RuntimeError, ValueError) as error:  # not installed, or without this GPU
            print(f"CTranslate2 is left out: {error}")
        model = prepare(model, arguments.device, "bf16")
    systems["batch by batch"] = batch_by_batch(model, sentences, device)
    for number in arguments.slots:
        systems[f"{number} slots"] = slots(model, sentences, device, number, graphs=False)
        if device.type == "cuda":
            systems[f"{number} slots, graphs"] = slots(model, sentences, device, number, graphs=True)
    return systems


def measure(systems: dict[str, System], rounds: int) -> dict[str, dict[str, object]]:
    tokens, seconds = in_turns(systems, rounds)  # graphs are recorded in the first call
    return {
        name: {
            "tokens": tokens[name],
            "seconds": [round(value, 3) for value in seconds[name]],
            "tokens_per_second": round(tokens[name] / statistics.median(seconds[name])),
        }
        for name in systems
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--models", nargs="+", choices=["tiny", "base", "big"], default=["base", "big"])
    parser.add_argument("--vocabulary", nargs="+", type=int, default=[37000, 10000])
    parser.add_argument("--slots", nargs="+", type=int, default=[128, 256, 512])
    parser.add_argument("--sentences", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    report: dict[str, dict[str, dict[str, object]]] = {}
    for name in arguments.models:
        for vocabulary in arguments.vocabulary:
            title = f"transformer_{name}, V = {vocabulary:,}"
            with tempfile.TemporaryDirectory() as folder:
                report[title] = measure(systems_of(name, vocabulary, arguments, Path(folder)), arguments.rounds)
            print(f"\n{title}, {arguments.sentences:,} sentences, on {arguments.device}")
            for system, result in report[title].items():
                print(f"  {system:<22}{result['tokens_per_second']:>9} tok/s  {result['seconds']}")
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
