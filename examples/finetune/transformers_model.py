"""Trains a small MarianMTModel with transformers, and saves it in a folder that `nmtkit import` can read.

    python transformers_model.py DATA FOLDER [UPDATES]      # DATA holds general.train.en and general.train.de

Like an OPUS-MT model, it has a SentencePiece model for each language and one vocabulary for both languages. The script
needs transformers and sentencepiece, but not nmtkit.
"""

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import sentencepiece
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import MarianConfig, MarianMTModel, MarianTokenizer

TOKENS = 2000  # tokens of an update on its larger side, padding included
WARMUP, RATE = 100, 0.003


def main(data: Path, folder: Path, updates: int) -> None:
    torch.manual_seed(1)
    lines = {
        side: (data / f"general.train.{side}").read_text(encoding="utf-8").split("\n")[:-1] for side in ("en", "de")
    }
    tokenizer = make_tokenizer(lines, folder)
    size = len(tokenizer)
    config = MarianConfig(
        vocab_size=size, d_model=128, encoder_layers=2, decoder_layers=2, encoder_ffn_dim=256, decoder_ffn_dim=256,
        encoder_attention_heads=4, decoder_attention_heads=4, activation_function="swish", scale_embedding=True,
        max_position_embeddings=256, dropout=0.1, pad_token_id=size - 1, decoder_start_token_id=size - 1,
        eos_token_id=0, forced_eos_token_id=0,
    )  # fmt: skip
    model = MarianMTModel(config).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda update: min((update + 1) / WARMUP, max(0.0, (updates - update) / (updates - WARMUP)))
    )
    pairs = [
        (tokenizer(source).input_ids, tokenizer(text_target=target).input_ids)
        for source, target in zip(lines["en"], lines["de"], strict=True)
    ]
    begun = time.perf_counter()
    for update, batch in zip(range(1, updates + 1), batches(pairs), strict=False):
        ids = pad_sequence([torch.tensor(source) for source, _ in batch], True, config.pad_token_id)
        labels = pad_sequence([torch.tensor(target) for _, target in batch], True, -100)
        read = pad_sequence([torch.tensor([size - 1, *target[:-1]]) for _, target in batch], True, config.pad_token_id)
        mask = ids != config.pad_token_id
        logits = model(input_ids=ids, attention_mask=mask, decoder_input_ids=read).logits
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=-100, label_smoothing=0.1
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if update % 50 == 0:
            print(f"update {update}: loss {loss:.2f}, {time.perf_counter() - begun:.0f} s", flush=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_tokenizer(lines: dict[str, list[str]], folder: Path) -> MarianTokenizer:
    folder.mkdir(parents=True)
    pieces: set[str] = set()
    for name, side in (("source", "en"), ("target", "de")):
        path = folder / f"{name}.spm"
        with path.open("wb") as file:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(lines[side]), model_writer=file, vocab_size=2000, minloglevel=2
            )
        model = sentencepiece.SentencePieceProcessor(str(path))
        pieces |= {model.id_to_piece(id) for id in range(3, len(model))}
    table = {piece: id for id, piece in enumerate(["</s>", "<unk>", *sorted(pieces), "<pad>"])}
    (folder / "vocab.json").write_text(json.dumps(table), encoding="utf-8")
    return MarianTokenizer(*(str(folder / name) for name in ("source.spm", "target.spm", "vocab.json")))


def batches(pairs: list[tuple[list[int], list[int]]]) -> Iterator[list[tuple[list[int], list[int]]]]:
    """Yields batches of pairs of similar length, in random order, without end."""
    generator = torch.Generator().manual_seed(1)
    while True:
        order = torch.randperm(len(pairs), generator=generator).tolist()
        order.sort(key=lambda index: max(map(len, pairs[index])))
        made, batch = [], []
        for index in order:
            if (len(batch) + 1) * max(map(len, pairs[index])) > TOKENS and batch:
                made.append(batch)
                batch = []
            batch.append(pairs[index])
        for number in torch.randperm(len(made), generator=generator).tolist():
            yield made[number]


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 450)
