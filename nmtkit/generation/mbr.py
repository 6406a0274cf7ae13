"""Minimum Bayes risk: of several candidates, the one most like all the others.

Source: Eikema and Aziz 2020, "Is MAP Decoding All You Need?"; utilities through sacreBLEU.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Literal

from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF


def utilities(texts: Sequence[str], metric: Literal["chrf", "bleu"]) -> list[float]:
    """The mean sentence score, 0 to 100, of each text against all of `texts` but itself; 0 where there is no other.

    A text that occurs n times counts n times as a reference.
    """
    scorer = CHRF() if metric == "chrf" else BLEU(effective_order=True)
    counts = Counter(texts)
    total = {
        text: sum(
            number * scorer.sentence_score(text, [other]).score for other, number in counts.items() if other != text
        )
        + (counts[text] - 1) * 100.0
        for text in counts
    }
    return [total[text] / max(1, len(texts) - 1) for text in texts]
