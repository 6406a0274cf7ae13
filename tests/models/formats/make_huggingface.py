"""Makes the folders in huggingface/: tiny models of transformers with random weights, and their translations.

    python tests/models/formats/make_huggingface.py      (with the package transformers)

The folders are written by `save_pretrained`, with weights in half precision, which halves their size. Each has an
expected.json with sources, the pieces and scores of greedy and beam search, and n-best lists.
"""

import gzip
import io
import json
import os
import shutil
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import sentencepiece
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

sys.path.insert(0, str(Path(__file__).parents[2]))
from builders import REAL_LINES

FOLDER = Path(__file__).parent / "huggingface"
OTHER_LINES = [line.translate(str.maketrans("aeiou", "öüäei")) for line in REAL_LINES]
LONGEST = 24  # pieces of a translation
LINES = [*REAL_LINES, "Ωmega, a letter that no piece holds.", "right"]
SHAPE = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4}
SHAPE |= {"decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 128}


def real_lines(number: int) -> list[str]:
    """Returns lines of Multi30k if MULTI30K names its folder, else the lines of the fixtures."""
    path = Path(os.environ.get("MULTI30K", "")) / "test_2016_flickr.en.gz"
    if not path.is_file():
        return LINES
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [line for line in map(str.strip, file) if len(line) < 100][:number]


def sentencepiece_model(lines: Sequence[str], size: int = 150, kind: str = "unigram") -> bytes:
    """Returns a model file without the normaliser's table, which takes 240 KB."""
    file = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(list(lines) * 3), model_writer=file, vocab_size=size, model_type=kind,
        hard_vocab_limit=False, normalization_rule_name="identity", minloglevel=2,
    )  # fmt: skip
    return file.getvalue()


def randomise(model: nn.Module, seed: int) -> None:
    """Fills a model with random weights, rounded to half precision, so that no norm is 1 and no bias 0."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "embed_positions" not in name or parameter.requires_grad:
                spread = 0.25 if "embed" in name or "shared" in name else 0.3
                start = parameter if parameter.dim() == 1 else torch.zeros(())
                parameter.copy_(start + spread * torch.randn_like(parameter))
            parameter.copy_(parameter.half())


def save(model: Any, folder: Path) -> None:
    model.half().save_pretrained(folder)
    model.float()


# --- the models -----------------------------------------------------------------------------------------------------


def make_marian(folder: Path, seed: int, separate: bool = False, languages: Sequence[str] = ()) -> None:
    """OPUS-MT: two SentencePiece models, and one table of ids, or with `separate` two, without three of the pieces."""
    from transformers import MarianConfig, MarianMTModel, MarianTokenizer

    folder.mkdir(parents=True)
    models = sentencepiece_model(REAL_LINES), sentencepiece_model(OTHER_LINES)
    tables = []
    for name, model in zip(("source", "target"), models, strict=True):
        (folder / f"{name}.spm").write_bytes(model)
        processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        tables.append([processor.id_to_piece(id) for id in range(3, len(processor))][:-3])
    pieces = [sorted(set(tables[0]) | set(tables[1]))] * 2 if not separate else [sorted(table) for table in tables]
    both = [{piece: id for id, piece in enumerate(["</s>", "<unk>", *table, *languages, "<pad>"])} for table in pieces]
    files = [folder / "vocab.json", folder / "target_vocab.json"][: 1 + separate]
    for file, table in zip(files, both, strict=False):
        file.write_text(json.dumps(table))
    config = MarianConfig(
        **(SHAPE | {"decoder_layers": 2}), vocab_size=len(both[0]), decoder_vocab_size=len(both[1]),
        activation_function="swish", scale_embedding=True, pad_token_id=both[0]["<pad>"], eos_token_id=0,
        decoder_start_token_id=both[1]["<pad>"], forced_eos_token_id=0,
        share_encoder_decoder_embeddings=not separate,
    )  # fmt: skip
    model = MarianMTModel(config).eval()
    randomise(model, seed)
    with torch.no_grad():
        bias = 0.5 * torch.randn(model.final_logits_bias.shape)
        bias[0, 0] = 1.5
        model.final_logits_bias.copy_(bias.half())
    model.generation_config.bad_words_ids = [[both[1]["<pad>"]]]
    save(model, folder)
    files = {"target_vocab_file": str(files[1])} if separate else {}
    paths = [str(folder / name) for name in ("source.spm", "target.spm", "vocab.json")]
    MarianTokenizer(*paths, separate_vocabs=separate, **files).save_pretrained(folder)


def make_m2m(folder: Path, seed: int) -> None:
    """M2M-100: one SentencePiece model, a table of ids without two of its pieces, the tokens of languages after it."""
    from transformers import M2M100Config, M2M100ForConditionalGeneration, M2M100Tokenizer

    folder.mkdir(parents=True)
    model = sentencepiece_model([*REAL_LINES, *OTHER_LINES], kind="bpe")
    (folder / "sentencepiece.bpe.model").write_bytes(model)
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    pieces = [processor.id_to_piece(id) for id in range(3, len(processor))][:-2]
    table = {piece: id for id, piece in enumerate(["<s>", "<pad>", "</s>", "<unk>", *pieces])}
    (folder / "vocab.json").write_text(json.dumps(table))
    tokenizer = M2M100Tokenizer(str(folder / "vocab.json"), str(folder / "sentencepiece.bpe.model"))
    config = M2M100Config(
        **SHAPE, vocab_size=len(table) + 108, pad_token_id=1, bos_token_id=0, eos_token_id=2, decoder_start_token_id=2,
        activation_function="relu", scale_embedding=True,
    )  # fmt: skip
    save_multilingual(M2M100ForConditionalGeneration(config), folder, seed)
    tokenizer.save_pretrained(folder)


def make_mbart(folder: Path, seed: int) -> None:
    """mBART-50: learned positions, ids of fairseq, as in the folders of the hub (transformers now writes others)."""
    from transformers import MBartConfig, MBartForConditionalGeneration

    folder.mkdir(parents=True)
    model = sentencepiece_model([*REAL_LINES, *OTHER_LINES])
    (folder / "sentencepiece.bpe.model").write_bytes(model)
    names = ["en_XX", "de_DE", "fr_XX"]
    (folder / "special_tokens_map.json").write_text(json.dumps({"additional_special_tokens": names}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "MBart50Tokenizer"}))
    config = MBartConfig(
        **SHAPE, vocab_size=len(sentencepiece.SentencePieceProcessor(model_proto=model)) + 1 + len(names) + 1,
        scale_embedding=True, decoder_start_token_id=2, activation_function="gelu",
    )  # fmt: skip
    save_multilingual(MBartForConditionalGeneration(config), folder, seed)


def make_nllb(folder: Path, seed: int) -> None:
    """NLLB: M2M-100's model, with ids of fairseq, tokens of 202 languages as eng_Latn, and entries that nothing has."""
    from transformers import M2M100Config, M2M100ForConditionalGeneration, NllbTokenizer
    from transformers.models.nllb.tokenization_nllb import FAIRSEQ_LANGUAGE_CODES

    folder.mkdir(parents=True)
    model = sentencepiece_model([*REAL_LINES, *OTHER_LINES], kind="bpe")
    (folder / "sentencepiece.bpe.model").write_bytes(model)
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    pieces = [processor.id_to_piece(id) for id in range(3, len(processor))]
    table = {piece: id for id, piece in enumerate(["<s>", "<pad>", "</s>", "<unk>", *pieces])}
    for token in (*FAIRSEQ_LANGUAGE_CODES, "<mask>"):
        table[token] = len(table)
    splits = [(piece[:cut], piece[cut:]) for piece in pieces for cut in range(1, len(piece))]
    tokenizer = NllbTokenizer(
        vocab=table, merges=[parts for parts in splits if set(parts) <= set(table)],
        extra_special_tokens=FAIRSEQ_LANGUAGE_CODES, src_lang="eng_Latn",
    )  # fmt: skip
    config = M2M100Config(
        **SHAPE, vocab_size=len(tokenizer) + 3, pad_token_id=1, bos_token_id=0, eos_token_id=2,
        decoder_start_token_id=2, activation_function="relu", scale_embedding=True,
    )  # fmt: skip
    save_multilingual(M2M100ForConditionalGeneration(config), folder, seed)
    tokenizer.save_pretrained(folder)


def save_multilingual(model: Any, folder: Path, seed: int) -> None:
    """Saves a model of random weights whose translations end, as the row of eos is near the bias of the last norm."""
    randomise(model.eval(), seed)
    with torch.no_grad():
        bias = model.get_decoder().layer_norm.bias
        push = bias / bias.square().sum()  # this adds 1 to the logit
        weight = model.get_decoder().embed_tokens.weight
        weight[2] = (weight[2] + push).half()
        weight[:2] = (-20 * push).half()  # no padding within a translation
    model.generation_config.forced_eos_token_id = None
    save(model, folder)


MODELS = {
    "marian_languages": partial(make_marian, languages=(">>deu<<", ">>nld<<")),
    "m2m_100": make_m2m,
    "nllb": make_nllb,
    "mbart_50": make_mbart,
    "marian": make_marian,
    "marian_separate": partial(make_marian, separate=True),
}
SEEDS = {"nllb": 10}  # some translations end with these settings
# settings of each model's translations: languages, or the text before each source line
LANGUAGES: dict[str, list[tuple[str | None, str | None]]] = {
    "marian": [(None, None)],
    "marian_separate": [(None, None)],
    "marian_languages": [(None, "deu"), (None, "nld")],
    "m2m_100": [("en", "de"), ("de", "fr")],
    "nllb": [("eng_Latn", "deu_Latn"), ("deu_Latn", "fra_Latn"), ("zho_Hans", "eng_Latn")],
    "mbart_50": [("en_XX", "de_DE"), ("de_DE", "fr_XX")],
}


# --- translations by transformers ---------------------------------------------------------------------------------


class FairseqTokenizer:
    """Gives the pieces of a SentencePiece model the ids of fairseq, like mBART-50's tokenizer before transformers 5."""

    def __init__(self, folder: Path) -> None:
        self.model = sentencepiece.SentencePieceProcessor(str(folder / "sentencepiece.bpe.model"))
        names = json.loads((folder / "special_tokens_map.json").read_text())["additional_special_tokens"]
        pieces = [self.model.id_to_piece(id) for id in range(3, len(self.model))]
        self.table = ["<s>", "<pad>", "</s>", "<unk>", *pieces, *names, "<mask>"]
        self.src_lang = names[0]

    def get_vocab(self) -> dict[str, int]:
        return {piece: id for id, piece in enumerate(self.table)}

    def __call__(self, line: str, return_tensors: str) -> Any:
        ids = self.get_vocab()
        pieces = [self.src_lang, *self.model.encode(line, out_type=str), "</s>"]
        return SimpleNamespace(input_ids=torch.tensor([[ids.get(piece, ids["<unk>"]) for piece in pieces]]))


class Original:
    """A model in a folder, loaded by transformers."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

        self.model: Any = AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=torch.float32).eval()
        mbart = self.model.config.model_type == "mbart"
        self.tokenizer: Any = FairseqTokenizer(folder) if mbart else AutoTokenizer.from_pretrained(folder)

    def language_id(self, code: str) -> int:
        if hasattr(self.tokenizer, "get_lang_id"):
            return int(self.tokenizer.get_lang_id(code))
        found: int = self.tokenizer.get_vocab()[code]
        return found

    def encode(self, line: str, source: str | None, target: str | None) -> Tensor:
        if source is not None:
            self.tokenizer.src_lang = source
        elif target is not None:
            line = f">>{target}<< {line}"
        return self.tokenizer(line, return_tensors="pt").input_ids

    def train(self, lines: Sequence[str], source: str | None, target: str | None, updates: int = 250) -> None:
        """Teaches the model to copy the first three words, so that translations of `lines` end at several lengths."""
        torch.manual_seed(1)
        marian = self.model.config.model_type == "marian"
        pairs = []
        for line in lines:
            start = " ".join(line.split()[:3])
            labels = self.tokenizer(text_target=start).input_ids if marian else self.encode(start, target, None)[0]
            pairs.append((self.encode(line, source, target)[0], torch.as_tensor(labels)))
        # The sinusoidal positions of Marian are constants, but some versions of transformers would train them.
        weights = [weight for name, weight in self.model.named_parameters() if not (marian and "positions" in name)]
        optimizer = torch.optim.Adam(weights, lr=5e-3)
        for update in range(updates):
            batch = [pairs[(16 * update + row) % len(pairs)] for row in range(16)]
            sources, targets = zip(*batch, strict=True)
            ids = pad_sequence(sources, batch_first=True, padding_value=self.model.config.pad_token_id)
            mask = pad_sequence([torch.ones_like(row) for row in sources], batch_first=True)
            labels = pad_sequence(targets, batch_first=True, padding_value=-100)
            self.model(input_ids=ids, attention_mask=mask, labels=labels).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if not marian:
            with torch.no_grad():
                bias = self.model.get_decoder().layer_norm.bias
                push = bias / bias.square().sum()
                # <s> is never the best token, but its probability is not 0; <pad> has the probability 0
                self.model.get_decoder().embed_tokens.weight[:2] = torch.stack([-3 * push, -20 * push])

    def target_ids(self) -> dict[str, int]:
        """Returns the target vocabulary: ids by piece."""
        if self.model.config.model_type == "marian":
            return dict(getattr(self.tokenizer, "target_encoder", self.tokenizer.encoder))
        languages = getattr(self.tokenizer, "id_to_lang_token", {})
        return dict(self.tokenizer.get_vocab()) | {piece: id for id, piece in languages.items()}

    def ids(self, pieces: Sequence[str]) -> list[int]:
        return [self.target_ids()[piece] for piece in pieces]

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Returns target pieces."""
        table = {id: piece for piece, id in self.target_ids().items()}
        return [table.get(id, f"<unused {id}>") for id in ids]

    @torch.inference_mode()
    def translate(
        self, line: str, source: str | None, target: str | None, beams: int, longest: int = LONGEST
    ) -> dict[str, Any] | None:
        """Returns the best translation of a line without the given prefix, and its log probability. Returns None if the
        beam search was cut off."""
        ids = self.encode(line, source, target)
        forced = {} if source is None else {"forced_bos_token_id": self.language_id(target)}
        begun = 1 if source is None else 2
        found = self.model.generate(
            ids, num_beams=beams, do_sample=False, length_penalty=0.0, max_new_tokens=longest + begun,
            early_stopping=False, return_dict_in_generate=True, output_scores=True, **forced,
        )  # fmt: skip
        start, tokens = found.sequences[0, :begun].tolist(), found.sequences[0, begun:].tolist()
        eos = self.model.config.eos_token_id
        tokens = tokens[: tokens.index(eos) if eos in tokens else longest][:longest]
        if beams > 1 and len(tokens) == longest:
            return None  # transformers does not count the log probability of a forced eos
        decoded = self.model(input_ids=ids, decoder_input_ids=torch.tensor([[*start, *tokens]])).logits[0]
        steps = decoded.log_softmax(-1)[begun - 1 :].gather(1, torch.tensor([*tokens, eos])[:, None])
        score = float(steps.double().sum())
        if beams > 1:
            assert abs(score - float(found.sequences_scores[0])) < 1e-3
        return {"pieces": self.pieces(tokens), "score": round(score, 5)}

    @torch.inference_mode()
    def nbest(
        self, line: str, source: str | None, target: str | None, longest: int = LONGEST
    ) -> list[dict[str, Any]] | None:
        """Returns the four best translations of a beam search of four, without the given prefix. Returns None if a
        translation did not end by itself: transformers accepts such translations, or adds eos without its log
        probability, but nmtkit adds the log probability of eos to every hypothesis."""
        forced = {} if source is None else {"forced_bos_token_id": self.language_id(target)}
        begun = 1 if source is None else 2
        found = self.model.generate(
            self.encode(line, source, target), num_beams=4, num_return_sequences=4, do_sample=False,
            length_penalty=0.0, max_new_tokens=longest + begun, early_stopping=False, return_dict_in_generate=True,
            output_scores=True, **forced,
        )  # fmt: skip
        eos = self.model.config.eos_token_id
        sequences = [tokens[begun:] for tokens in found.sequences.tolist()]
        if not all(eos in tokens[: longest - 1] for tokens in sequences):
            return None
        return [
            {"pieces": self.pieces(tokens[: tokens.index(eos)]), "score": round(score, 5)}
            for tokens, score in zip(sequences, found.sequences_scores.tolist(), strict=True)
        ]

    @torch.inference_mode()
    def log_probabilities(self, line: str, source: str | None, target: str | None, ids: list[int]) -> Tensor:
        """Returns the log probabilities of all tokens after each of the decoder's tokens `ids`: T V."""
        found = self.model(input_ids=self.encode(line, source, target), decoder_input_ids=torch.tensor([ids]))
        return found.logits[0].log_softmax(-1)

    def expected(
        self, lines: Sequence[str], source: str | None, target: str | None, longest: int = LONGEST
    ) -> list[dict[str, Any]]:
        """Returns the expected results for lines: greedy search, beam search, and the n-best list of the latter."""
        searches = (("greedy", 1), ("beam", 4))
        return [
            {"source": line, "nbest": self.nbest(line, source, target, longest)}
            | {name: self.translate(line, source, target, beams, longest) for name, beams in searches}
            for line in lines
        ]


def main() -> None:
    shutil.rmtree(FOLDER, ignore_errors=True)
    for name, make in MODELS.items():
        folder = FOLDER / name
        make(folder, SEEDS.get(name, 1))
        original = Original(folder)
        results = [{"languages": pair, "lines": original.expected(LINES, *pair)} for pair in LANGUAGES[name]]
        text = json.dumps(results, ensure_ascii=False, separators=(",", ":"))
        (folder / "expected.json").write_text(text + "\n", encoding="utf-8")
        ended = [len(line["beam"]["pieces"]) for result in results for line in result["lines"] if line["beam"]]
        print(name, "lengths of what ends:", ended, sum(it.stat().st_size for it in folder.iterdir()) // 1024, "KB")


if __name__ == "__main__":
    main()
