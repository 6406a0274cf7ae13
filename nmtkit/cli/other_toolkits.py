"""Names of other toolkits' commands and flags here, to answer those who type them out of habit.

A row says how the sentence goes on: "fairseq's --fp16 …" "is --precision fp16 here". Rows are for flags that the
command of that name does not have; a flag is written with dashes, and underscores are alike.
"""

import difflib
import re
from collections.abc import Collection

Rows = dict[str, dict[str, str]]  # toolkit -> name there -> how the sentence goes on

COMMANDS: Rows = {
    "fairseq": {
        "interactive": "is nmtkit generate --path averaged.pt here: it reads standard input, and prompts at a terminal",
        "validate": "is nmtkit generate data-bin --path averaged.pt --gen-subset valid --score-reference here",
        "eval-lm": "has no counterpart here: nmtkit has no language models",
        "hydra-train": "is nmtkit train --config run.toml here",
    },
    "OpenNMT-py": {
        "build-vocab": "is part of nmtkit preprocess here",
        "translate": "is nmtkit generate here",
        "average-models": "is nmtkit average-checkpoints here",
        "server": "has no counterpart here; nmtkit export writes a model that CTranslate2 serves",
    },
    "Sockeye": {
        "prepare-data": "is nmtkit preprocess here",
        "average": "is nmtkit average-checkpoints here",
        "evaluate": "is nmtkit score here",
    },
    "JoeyNMT": {"test": "is nmtkit generate data-bin --path averaged.pt, piped to nmtkit score --data data-bin, here"},
    "Marian": {
        "vocab": "is part of nmtkit preprocess here",
        "decoder": "is nmtkit generate here",
        "scorer": "is nmtkit generate --score-reference here",
        "convert": "is nmtkit export here",
    },
}

PRECISIONS = {
    "--fp16": "is --precision fp16 here; the default, auto, is bf16 where the device has it",
    "--bf16": "is --precision bf16 here, the default where the device has it",
    "--memory-efficient-fp16": "is --precision fp16 here; the default, auto, is bf16 where the device has it",
    "--memory-efficient-bf16": "is --precision bf16 here, the default where the device has it",
    "--cpu": "is --device cpu here",
    "--user-dir": "is --plugin FILE here",
}

FLAGS: dict[str, Rows] = {
    "preprocess": {
        "fairseq": {
            "--joined-dictionary": "is the default here; --separate-vocab makes two vocabularies",
            "--nwordssrc": "is --vocab-size here",
            "--nwordstgt": "is --vocab-size here",
            "--srcdict": "is --tokenizer-from here: a checkpoint, a dataset, or a .model file",
            "--tgtdict": "is --tokenizer-from here: two .model files, for source and target",
            "--thresholdsrc": "is not needed here: the vocabulary is of pieces (--vocab-size)",
            "--thresholdtgt": "is not needed here: the vocabulary is of pieces (--vocab-size)",
            "--align-suffix": "is --alignments FILE here",
            "--bpe": "is --model-type bpe here, the default: text goes in as it is",
            "--tokenizer": "is not needed here: text goes in as it is",
            "--only-source": "has no counterpart here: a dataset has both sides",
            "--dataset-impl": "is not needed here",
        },
        "OpenNMT-py": {
            "--src-vocab-size": "is --vocab-size here",
            "--tgt-vocab-size": "is --vocab-size here",
            "--share-vocab": "is the default here; --separate-vocab makes two vocabularies",
            "--save-data": "is --destdir here",
            "--src-seq-length": "is --max-len here",
            "--tgt-seq-length": "is --max-len here",
            "--train-src": "is --trainpref here: the path without its language, as in data/train for data/train.en",
            "--train-tgt": "is --trainpref here: the path without its language, as in data/train for data/train.en",
            "--valid-src": "is --validpref here: the path without its language",
            "--valid-tgt": "is --validpref here: the path without its language",
        },
        "Sockeye": {
            "--source": "is --trainpref here: the path without its language, as in data/train for data/train.en",
            "--target": "is --trainpref here: the path without its language, as in data/train for data/train.en",
            "--shared-vocab": "is the default here; --separate-vocab makes two vocabularies",
            "--num-words": "is --vocab-size here",
            "--max-seq-len": "is --max-len here",
            "--output": "is --destdir here",
        },
        "Marian": {
            "--train-sets": "is --trainpref here: the path without its language, as in data/train for data/train.en",
            "--vocabs": "is --tokenizer-from here",
            "--dim-vocabs": "is --vocab-size here",
        },
    },
    "train": {
        "fairseq": PRECISIONS
        | {
            "--task": "is not needed here: translation is the only task",
            "--source-lang": "is known from the dataset here; nmtkit preprocess has it",
            "--target-lang": "is known from the dataset here; nmtkit preprocess has it",
            "--batch-size": "is --max-sentences here; --batch-tokens is the size of an update",
            "--batch-size-valid": "is --max-tokens here, for training and validation alike",
            "--max-tokens-valid": "is --max-tokens here, for training and validation alike",
            "--encoder-embed-dim": "is --d-model here",
            "--decoder-embed-dim": "is --d-model here",
            "--encoder-ffn-embed-dim": "is --d-ff here",
            "--decoder-ffn-embed-dim": "is --d-ff here",
            "--encoder-attention-heads": "is --heads here",
            "--decoder-attention-heads": "is --heads here",
            "--encoder-normalize-before": "is --pre-norm here",
            "--decoder-normalize-before": "is --pre-norm here",
            "--encoder-learned-pos": "is --positions learned here",
            "--decoder-learned-pos": "is --positions learned here",
            "--max-source-positions": "is --max-positions here",
            "--max-target-positions": "is --max-positions here",
            "--share-all-embeddings": "is --share-embeddings here, the default with a joint vocabulary",
            "--share-decoder-input-output-embed": "is --share-embeddings here, the default with a joint vocabulary",
            "--relu-dropout": "is --activation-dropout here",
            "--checkpoint-activations": "is --gradient-checkpointing here",
            "--alignment-lambda": "is --alignment-weight here, with --criterion guided_alignment",
            "--warmup-init-lr": "is not needed here: warm-up begins at 0",
            "--lr-shrink": "goes with --lr-scheduler plateau here",
            "--min-lr": "goes with --lr-scheduler plateau here",
            "--stop-min-lr": "has no counterpart here: --max-update ends the run",
            "--keep-last-epochs": "is --keep-last here, of all checkpoints",
            "--keep-interval-updates": "is --keep-last here, of all checkpoints",
            "--keep-best-checkpoints": "is --keep-best here",
            "--maximize-best-checkpoint-metric": "is not needed here: --best-checkpoint-metric bleu is maximised",
            "--eval-bleu": "is --metrics bleu here, the default",
            "--eval-bleu-args": "is --valid-beam here",
            "--eval-bleu-detok": "is not needed here: BLEU is sacreBLEU's, against the raw references",
            "--eval-bleu-remove-bpe": "is not needed here: BLEU is sacreBLEU's, against the raw references",
            "--eval-bleu-print-samples": "is not needed here: report.html in --save-dir shows translations",
            "--restore-file": "is not needed here: the same command resumes; --finetune-from FILE starts from weights",
            "--finetune-from-model": "is --finetune-from here",
            "--reset-dataloader": "has no counterpart here: a resumed run goes on where it stopped",
            "--reset-meters": "has no counterpart here: a resumed run goes on where it stopped",
            "--store-ema": "is --ema-decay here",
            "--ddp-backend": "is --parallel ddp or --parallel fsdp here",
            "--distributed-world-size": "is --nproc-per-node here; torchrun starts several machines",
            "--distributed-port": "is not needed here; torchrun starts several machines",
            "--tensorboard-logdir": "is --tensorboard-dir here, with --callbacks tensorboard",
            "--log-format": "is not needed here: log.jsonl in --save-dir has every figure",
            "--no-progress-bar": "is not needed here: the live line is for terminals only; --quiet silences all",
            "--num-workers": "is not needed here: batches are read from memory-mapped files on a thread",
            "--skip-invalid-size-inputs-valid-test": "is not needed here: no pair is skipped in silence",
            "--no-epoch-checkpoints": "is --keep-last here",
            "--required-batch-size-multiple": "is not needed here: there is no padding",
            "--left-pad-source": "is not needed here: there is no padding",
        },
        "OpenNMT-py": {
            "--save-model": "is --save-dir here",
            "--save-checkpoint-steps": "is --save-interval-updates here",
            "--train-steps": "is --max-update here",
            "--valid-steps": "is --validate-interval-updates here",
            "--train-from": "is not needed here: the same command resumes; --finetune-from FILE starts from weights",
            "--warmup-steps": "is --warmup-updates here",
            "--learning-rate": "is --lr here",
            "--max-grad-norm": "is --clip-norm here",
            "--accum-count": "is --update-freq here, or --batch-tokens for the size of an update",
            "--batch-type": "is not needed here: --batch-tokens counts tokens",
            "--world-size": "is --nproc-per-node here; torchrun starts several machines",
            "--gpu-ranks": "is --nproc-per-node here; torchrun starts several machines",
            "--keep-checkpoint": "is --keep-last here",
            "--enc-layers": "is --encoder-layers here",
            "--dec-layers": "is --decoder-layers here",
            "--layers": "is --encoder-layers and --decoder-layers here",
            "--hidden-size": "is --d-model here",
            "--transformer-ff": "is --d-ff here",
            "--decay-method": "is --lr-scheduler here",
            "--early-stopping": "is --patience here",
            "--average-decay": "is --ema-decay here",
            "--model-dtype": "is --precision here",
            "--report-every": "is --log-interval here",
        },
        "Sockeye": {
            "--prepared-data": "is the dataset here: nmtkit train data-bin",
            "--initial-learning-rate": "is --lr here",
            "--learning-rate-warmup": "is --warmup-updates here",
            "--learning-rate-scheduler-type": "is --lr-scheduler here",
            "--checkpoint-interval": "is --save-interval-updates and --validate-interval-updates here",
            "--max-num-checkpoint-not-improved": "is --patience here",
            "--num-layers": "is --encoder-layers and --decoder-layers here",
            "--transformer-model-size": "is --d-model here",
            "--transformer-attention-heads": "is --heads here",
            "--transformer-feed-forward-num-hidden": "is --d-ff here",
            "--max-updates": "is --max-update here",
            "--amp": "is --precision bf16 here, the default where the device has it",
        },
        "Marian": {
            "--mini-batch": "is --max-sentences here; --batch-tokens is the size of an update",
            "--mini-batch-words": "is --batch-tokens here",
            "--mini-batch-fit": "is not needed here: without --max-tokens, a run on a GPU finds what fits",
            "--optimizer-delay": "is --update-freq here",
            "--lr-warmup": "is --warmup-updates here",
            "--learn-rate": "is --lr here",
            "--after-batches": "is --max-update here",
            "--after-epochs": "is --max-epoch here",
            "--valid-freq": "is --validate-interval-updates here",
            "--save-freq": "is --save-interval-updates here",
            "--disp-freq": "is --log-interval here",
            "--exponential-smoothing": "is --ema-decay here",
            "--transformer-heads": "is --heads here",
            "--transformer-dim-ffn": "is --d-ff here",
            "--transformer-dropout": "is --dropout here",
            "--dim-emb": "is --d-model here",
            "--enc-depth": "is --encoder-layers here",
            "--dec-depth": "is --decoder-layers here",
            "--model": "is --save-dir here",
            "--devices": "is CUDA_VISIBLE_DEVICES, or --nproc-per-node, here",
        },
        "Hugging Face": {
            "--output-dir": "is --save-dir here",
            "--max-steps": "is --max-update here",
            "--num-train-epochs": "is --max-epoch here",
            "--per-device-train-batch-size": "is --max-sentences here; --batch-tokens is the size of an update",
            "--gradient-accumulation-steps": "is --update-freq here, or --batch-tokens for the size of an update",
            "--lr-scheduler-type": "is --lr-scheduler here",
        },
    },
    "generate": {
        "fairseq": PRECISIONS
        | {
            "--remove-bpe": "is not needed here: translations are plain text",
            "--post-process": "is not needed here: translations are plain text",
            "--bpe": "is not needed here: the checkpoint holds its tokenizer",
            "--tokenizer": "is not needed here: the checkpoint holds its tokenizer",
            "--task": "is not needed here: translation is the only task",
            "--batch-size": "is --max-tokens here; it changes speed, never a translation",
            "--max-sentences": "is --max-tokens here; it changes speed, never a translation",
            "--buffer-size": "is not needed here: lines that wait are translated together",
            "--sampling-topk": "is --top-k here",
            "--sampling-topp": "is --top-p here",
            "--diverse-beam-groups": "is --diverse-groups here",
            "--diverse-beam-strength": "is --diversity here",
            "--no-repeat-ngram-size": "is --no-repeat-ngram here",
            "--prefix-size": "is --prefix FILE here: a beginning for each line",
            "--print-alignment": "is --alignment hard with --format jsonl here",
            "--print-step": "has no counterpart here",
            "--replace-unk": "is --replace-unknown here",
            "--sacrebleu": "is nmtkit score here",
            "--scoring": "is nmtkit score --metric here",
            "--results-path": "is standard output here: nmtkit generate … > translated.de",
            "--num-shards": "is torchrun --nproc-per-node N -m nmtkit generate here, or --workers on a CPU",
            "--shard-id": "is torchrun --nproc-per-node N -m nmtkit generate here, or --workers on a CPU",
            "--model-overrides": "has no counterpart here: a checkpoint is complete",
            "--unnormalized": "is --lenpen 0 here",
        },
        "OpenNMT-py": {
            "--model": "is --path here",
            "--src": "is --input here, or standard input",
            "--tgt": "is --reference here, with --score-reference",
            "--beam-size": "is --beam here",
            "--n-best": "is --nbest here",
            "--min-length": "is --min-len here",
            "--max-length": "is --max-len-a and --max-len-b here",
            "--length-penalty": "is --lenpen here",
            "--block-ngram-repeat": "is --no-repeat-ngram here",
            "--random-sampling-topk": "is --top-k with --sampling here",
            "--random-sampling-topp": "is --top-p with --sampling here",
            "--random-sampling-temp": "is --temperature with --sampling here",
            "--int8": "is --precision int8 here",
            "--gpu": "is --device cuda here",
            "--report-align": "is --alignment hard with --format jsonl here",
        },
        "Sockeye": {
            "--models": "is --path here",
            "--nbest-size": "is --nbest here",
            "--length-penalty-alpha": "is --lenpen here",
            "--sample": "is --sampling here",
            "--dtype": "is --precision here",
            "--use-cpu": "is --device cpu here",
        },
        "Marian": {
            "--vocabs": "is not needed here: the checkpoint holds its tokenizer",
            "--normalize": "is --lenpen here",
            "--n-best": "is --nbest with --format jsonl here",
            "--mini-batch": "is --max-tokens here; it changes speed, never a translation",
            "--cpu-threads": "is --workers here",
            "--quiet-translation": "is --quiet here",
        },
        "Hugging Face": {
            "--num-beams": "is --beam here",
            "--max-new-tokens": "is --max-len-b with --max-len-a 0 here",
            "--num-return-sequences": "is --nbest here",
            "--do-sample": "is --sampling here",
        },
    },
    "average-checkpoints": {
        "fairseq": {
            "--inputs": "is an argument here: nmtkit average-checkpoints checkpoints --last 5 --output averaged.pt",
            "--num-epoch-checkpoints": "is --last here",
            "--num-update-checkpoints": "is --last here",
            "--num-best-checkpoints": "is --best here",
        },
        "OpenNMT-py": {
            "--models": "is an argument here: nmtkit average-checkpoints one.pt two.pt --output averaged.pt"
        },
        "Sockeye": {"--strategy": "is --best or --last here", "--metric": "is --best-checkpoint-metric here"},
    },
    "score": {
        "fairseq": {
            "--order": "has no counterpart here: BLEU has 4-grams",
            "--ignore-case": "is --lowercase here",
            "--sacrebleu": "is the default here",
            "--sentence-bleu": "is --sentence-level here",
        },
        "sacreBLEU": {
            "--input": "is --sys here, or standard input",
            "--metrics": "is --metric here",
            "--paired-bs": "is --test bootstrap here, the default with several --sys",
            "--paired-ar": "is --test randomization here",
            "--paired-bs-n": "is --samples here",
            "--language-pair": "is --target-lang here, for tokenized-bleu",
        },
    },
}


def answer(rows: Rows, name: str) -> str | None:
    """Returns the sentence about a command or flag of another toolkit, None where no row has it."""
    name = name.replace("_", "-")
    for toolkit, names in rows.items():
        if name in names:
            return f"{toolkit}'s {name} {names[name]}"
    return None


def about_command(name: str, known: Collection[str]) -> str | None:
    """Returns what to type instead of an unknown command: another toolkit's, or one that is misspelt."""
    name = re.sub("^(fairseq|onmt|sockeye|marian)-", "", name.replace("_", "-"))
    if name in known:
        return f"it is nmtkit {name} here"
    nearest = difflib.get_close_matches(name, known, 1)
    return answer(COMMANDS, name) or (f"did you mean {nearest[0]!r}?" if nearest else None)
