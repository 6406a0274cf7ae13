"""Makes the folders in fairseq/: tiny models that the commands of fairseq train, and their translations.

    FAIRSEQ tests/models/formats/make_fairseq.py      (FAIRSEQ: a Python that has the package fairseq, 0.12.2)

The checkpoints have the format of fairseq-train, with weights in half precision and without progress meters. Their
settings are in a Namespace in a dict (fairseq 0.12), in a DictConfig of omegaconf (0.10), or in a Namespace alone, in
the file format of torch before 1.6 (0.9). Each folder has an expected.json: sources, and the pieces and
scores that greedy and beam search find for them.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import sentencepiece
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from make_huggingface import LINES, OTHER_LINES, REAL_LINES, sentencepiece_model

FOLDER = Path(__file__).parent / "fairseq"
LONGEST = 24  # pieces of a translation
SEARCHES = {"greedy": 1, "beam": 4}
SHAPE = "--encoder-embed-dim 32 --encoder-ffn-embed-dim 48 --decoder-embed-dim 32 --decoder-ffn-embed-dim 48"
SHAPE += " --encoder-layers 1 --decoder-layers 1 --encoder-attention-heads 4 --decoder-attention-heads 4"
PRE_NORM = "--encoder-normalize-before --decoder-normalize-before --encoder-learned-pos --decoder-learned-pos"
PRE_NORM += " --layernorm-embedding --no-scale-embedding --activation-fn gelu"
PRE_NORM += " --max-source-positions 80 --max-target-positions 80"
MULTILINGUAL = "--task translation_multi_simple_epoch --lang-pairs en-de,de-en --encoder-langtok src --decoder-langtok"
KINDS = {
    "shared": "--arch transformer_iwslt_de_en --share-all-embeddings",
    "separate": f"--arch transformer_wmt_en_de {PRE_NORM}",
    "tied": "--arch transformer_vaswani_wmt_en_de_big --share-decoder-input-output-embed --decoder-layerdrop 0.1",
    "languages": f"--arch transformer --share-all-embeddings {MULTILINGUAL}",
}
LANGUAGES: dict[str, list[tuple[str | None, str | None]]] = {
    "shared": [(None, None)],
    "separate": [(None, None)],
    "tied": [(None, None)],
    "languages": [("en", "de"), ("de", "en")],
}


def train(kind: str, folder: Path, pairs: Sequence[tuple[str, str]], flags: str, updates: int = 250) -> None:
    """Trains a model by the commands of fairseq, and leaves the files for `nmtkit import` in the new `folder`."""
    folder.mkdir(parents=True)
    separate = kind == "separate"
    texts = dict(zip(("en", "de"), zip(*pairs, strict=True), strict=True))
    both = [sentencepiece_model([*texts["en"], *texts["de"]], 160)] * 2
    models = [sentencepiece_model(text, 120) for text in texts.values()] if separate else both
    with tempfile.TemporaryDirectory() as temporary:
        data = Path(temporary) / "data.en-de"
        for model, (language, text) in zip(models, texts.items(), strict=True):
            name = f"spm.{language}.model" if separate else "sentencepiece.bpe.model"
            (folder / name).write_bytes(model)
            processor = sentencepiece.SentencePieceProcessor(model_proto=model)
            # two pieces that the dictionary lacks, and entries that fairseq adds for padding
            pieces = [processor.id_to_piece(id) for id in range(3, len(processor))][:-2]
            pieces += ["madeupword0000", "madeupword0001"]
            counts = "".join(f"{piece} {len(pieces) - index}\n" for index, piece in enumerate(pieces))
            (folder / f"dict.{language}.txt").write_text(counts, encoding="utf-8")
            lines = [" ".join(processor.encode(line, out_type=str)) + "\n" for line in text]
            (Path(temporary) / f"train.{language}").write_text("".join(lines), encoding="utf-8")
        dictionaries = f"--srcdict {folder}/dict.en.txt --tgtdict {folder}/dict.de.txt"
        prefix = f"{temporary}/train"
        run(f"preprocess -s en -t de --trainpref {prefix} --validpref {prefix} --destdir {data} {dictionaries}")
        run(
            f"train {data} {SHAPE} {flags} --max-tokens 1000 --optimizer adam --lr 0.005 --cpu --num-workers 0 "
            f"--max-update {updates} --save-dir {temporary}/saved --no-save-optimizer-state --no-epoch-checkpoints"
        )
        shutil.copy(f"{temporary}/saved/checkpoint_last.pt", folder / "checkpoint_best.pt")


def start_of(line: str) -> str:
    """Returns the first three words, so that translations end soon, and at several lengths."""
    return " ".join(line.split()[:3])


def run(command: str) -> None:
    name, *arguments = command.split()
    subprocess.run(
        [sys.executable, "-m", f"fairseq_cli.{name}", *arguments], check=True, capture_output=True, text=True
    )


def perturb(kind: str, path: Path) -> None:
    """Changes norms and biases, which training has hardly changed. Saves the checkpoint in an older format."""
    state = torch.load(path, weights_only=False)
    weights = state["model"]
    torch.manual_seed(1)
    for name, tensor in weights.items():
        if "norm" in name or "bias" in name:
            weights[name] = tensor + 0.1 * torch.randn_like(tensor)
    for name in [
        name for name in weights if "encoder.layers.0.in_proj" in name
    ]:  # an encoder layer has these weights twice
        kinds = [f"encoder.layers.0.self_attn.{part}_proj.{name.rpartition('_')[2]}" for part in "qkv"]
        weights[name] = torch.cat([weights[part] for part in kinds])
    state["model"] = {name: tensor.half() for name, tensor in weights.items()}
    state["extra_state"].pop("metrics")
    if kind == "separate":  # the format of fairseq 0.9
        state["args"] = state.pop("cfg")["model"]
        torch.save(state, path, _use_new_zipfile_serialization=False)
        return
    if kind == "tied":  # the format of fairseq 0.10
        import omegaconf._utils

        omegaconf._utils.is_primitive_type = lambda _: True  # fairseq does the same
        state["cfg"] = omegaconf.OmegaConf.create(state["cfg"])
    torch.save(state, path)


# --- translations by fairseq -------------------------------------------------------------------------------------


class Original:
    """A model in a folder, loaded by fairseq."""

    def __init__(self, folder: Path) -> None:
        from fairseq import checkpoint_utils

        languages = {"source_lang": "en", "target_lang": "de", "data": str(folder)}
        load = checkpoint_utils.load_model_ensemble_and_task
        models, _, self.task = load([str(folder / "checkpoint_best.pt")], languages)
        self.model = models[0].float().eval()
        files = sorted(folder.glob("*.model"), reverse=True)  # spm.en.model first
        self.source, self.target = (sentencepiece.SentencePieceProcessor(str(it)) for it in (files[0], files[-1]))

    def encode(self, line: str, source: str | None) -> torch.Tensor:
        pieces = self.source.encode(line, out_type=str)
        pieces = pieces if source is None else [f"__{source}__", *pieces]
        return self.task.source_dictionary.encode_line(" ".join(pieces), add_if_not_exist=False).long()

    @torch.inference_mode()
    def translate(self, line: str, source: str | None, target: str | None, beam: int) -> dict[str, Any]:
        from fairseq.sequence_generator import SequenceGenerator

        words, prefix = self.task.target_dictionary, None
        if target is not None:
            prefix = torch.tensor([[words.index(f"__{target}__")]])
        # a maximum length that no translation reaches, so that the search ends by its own rule
        generator = SequenceGenerator(
            [self.model], words, beam_size=beam, max_len_a=0, max_len_b=LONGEST + (prefix is not None),
            normalize_scores=False,
        )  # fmt: skip
        ids = self.encode(line, source)[None]
        sample = {"net_input": {"src_tokens": ids, "src_lengths": torch.tensor([ids.shape[1]])}}
        best = generator.generate([self.model], sample, prefix_tokens=prefix)[0][0]
        tokens, scores = best["tokens"].tolist(), best["positional_scores"].double()
        begun = 0 if prefix is None else 1  # in nmtkit, the given prefix adds nothing to the score
        pieces = [words[token] for token in tokens[begun:-1]]
        return {"pieces": pieces, "score": round(float(scores[begun:].sum()), 5)}

    @torch.inference_mode()
    def log_probabilities(self, line: str, source: str | None, pieces: Sequence[str]) -> dict[str, list[float]]:
        """Returns the log probabilities of all entries after eos and `pieces`, by entry."""
        words = self.task.target_dictionary
        ids = self.encode(line, source)[None]
        start = torch.tensor([[2, *(words.index(piece) for piece in pieces)]])
        found = self.model(ids, torch.tensor([ids.shape[1]]), start)[0][0].log_softmax(-1)
        return {words[id]: [round(value, 5) for value in found[:, id].tolist()] for id in range(len(words))}

    def expected(self, lines: Sequence[str], source: str | None, target: str | None) -> list[dict[str, Any]]:
        found = []
        for line in lines:
            best = {name: self.translate(line, source, target, beam) for name, beam in SEARCHES.items()}
            found.append({"source": line} | best)
        for line in found[:2]:
            begin = [] if target is None else [f"__{target}__"]
            pieces = [*begin, *line["greedy"]["pieces"]][:4]
            line["prefix"] = pieces
            line["log_probabilities"] = self.log_probabilities(line["source"], source, pieces)
        return found


def main() -> None:
    """Makes the folders. If a folder is given, prints fairseq's translations of the lines of standard input instead."""
    if len(sys.argv) > 1:
        kind, folder, lines = sys.argv[1], Path(sys.argv[2]), sys.stdin.read().splitlines()
        train(kind, folder, [(line, start_of(line)) for line in lines], KINDS[kind])
        original = Original(folder)
        json.dump([{"languages": it, "lines": original.expected(lines, *it)} for it in LANGUAGES[kind]], sys.stdout)
        return
    shutil.rmtree(FOLDER, ignore_errors=True)
    for kind, flags in KINDS.items():
        folder = FOLDER / kind
        train(kind, folder, list(zip(REAL_LINES, map(start_of, OTHER_LINES), strict=True)) * 8, flags)
        perturb(kind, folder / "checkpoint_best.pt")
        original = Original(folder)
        results = [{"languages": pair, "lines": original.expected(LINES, *pair)} for pair in LANGUAGES[kind]]
        text = json.dumps(results, ensure_ascii=False, separators=(",", ":"))
        (folder / "expected.json").write_text(text + "\n", encoding="utf-8")
        lengths = [len(line["beam"]["pieces"]) for result in results for line in result["lines"]]
        print(kind, "lengths:", lengths, sum(it.stat().st_size for it in folder.iterdir()) // 1024, "KB")


if __name__ == "__main__":
    os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"
    main()
