"""Greedy search: the same hypotheses and scores as `beam_search.BeamSearch` with one hypothesis, in fewer operations.

The time of a step of a small model depends on the number of its operations. A greedy search does not select or sort
candidates, and does not test whether an open hypothesis can become better than a finished hypothesis: a sentence is
finished when its best token is eos.
"""

import math

import torch

from nmtkit.data.tokenizers.tokenizer import BOS, EOS
from nmtkit.translation.search.beam_search import COMPACTION, BeamSearch, nonempty
from nmtkit.translation.search.candidates import length_penalty
from nmtkit.translation.search.options import SearchOptions
from nmtkit.translation.search.segments import Hypothesis

# B sentences still in the search, each with one hypothesis, V target vocabulary


def is_greedy(options: SearchOptions) -> bool:
    return options.beam == 1 and not options.sampling


class GreedySearch(BeamSearch):
    """A search that continues each sentence with the most probable token."""

    def run(self) -> list[list[Hypothesis]]:
        tokens = torch.full((len(self.sentence),), BOS, device=self.device)
        log_probability = torch.zeros(len(self.sentence), dtype=torch.float64, device=self.device)  # B
        open_rows = dict(enumerate(self.sentence.tolist()))  # row -> sentence; finished sentences may stay as padding
        outputs: list[list[int]] = [[] for _ in open_rows]  # the tokens of each sentence
        length = 0
        # memory of `history`, shape [B, 1, positions]; tokens are written only if a constraint reads the history
        space = torch.zeros(len(outputs), 1, int(self.constraint_processor.max_length.max()) + 1, dtype=torch.int64)
        while True:
            self.history = space.narrow(2, 0, length)
            scores = self.constraint_processor.apply(self.scores(tokens), self.history)
            best, tokens = scores.max(1)
            before = log_probability if self.normalizer is None else log_probability - self.normalizer
            log_probability = best + before
            values, added = log_probability.tolist(), tokens.tolist()
            for row, sentence in list(open_rows.items()):
                if added[row] == EOS or not math.isfinite(values[row]):
                    self.end(sentence, outputs[sentence], values[row])
                    del open_rows[row]
                else:
                    outputs[sentence].append(added[row])
            if not open_rows:
                return [nonempty(hypotheses) for hypotheses in self.finished.best]
            if self.constraint_processor.reads_history:
                space[:, 0, length] = tokens.cpu()
            length += 1
            if len(added) - len(open_rows) >= COMPACTION * len(added):
                kept = torch.tensor(list(open_rows))
                self.drop_finished(kept)
                space = space[kept]
                log_probability, tokens = (part[kept.to(self.device)] for part in (log_probability, tokens))
                open_rows = dict(enumerate(open_rows.values()))

    def end(self, sentence: int, output: list[int], log_probability: float) -> None:
        """Finishes the hypothesis of a sentence. Drops the hypothesis if its log probability is not finite."""
        if math.isfinite(log_probability):
            score = log_probability / length_penalty(len(output) + 1, self.options.lenpen)
            self.finished.best[sentence].append(Hypothesis(output, score, log_probability))
