"""Turns scores of a pair into the probability that the pair is good.

A logistic regression separates good pairs from wrong pairs. `noise` makes the wrong pairs: targets with errors that are
typical of crawled text.
"""

from collections.abc import Sequence
from random import Random
from typing import Literal

import numpy as np
import numpy.typing as npt

Error = Literal["misaligned", "truncated", "reordered", "replaced", "appended", "joined"]
ERRORS: tuple[Error, ...] = (
    "misaligned",  # a different target of similar length
    "truncated",  # a lost beginning or end
    "reordered",  # parts in a different order
    "replaced",  # random words of the corpus replace 25 to 60 % of the words
    "appended",  # half of a different target at the end
    "joined",  # halves of two different targets
)


def noise(targets: Sequence[str], seed: int, errors: Sequence[Error] = ERRORS) -> list[str]:
    """Returns a wrong target for each target. The targets get the `errors` in turn.

    If at most half of the targets have spaces, characters are used instead of words.
    """
    random = Random(seed)
    glue = " " if sum(" " in target for target in targets) * 2 > len(targets) else ""
    split = [target.split() if glue else list(target) for target in targets]
    by_length = sorted(range(len(split)), key=lambda row: (len(split[row]), random.random()))
    neighbour = dict(zip(by_length, [*by_length[1:2], *by_length], strict=False))
    vocabulary = [word for words in split for word in words]
    result = []
    for row, words in enumerate(split):
        other, half = split[row - random.randrange(1, max(2, len(split)))], max(1, len(words) // 2)
        match errors[row % len(errors)]:
            case "misaligned":
                wrong = split[neighbour[row]]
            case "truncated":
                lost = max(1, int(len(words) * random.uniform(0.3, 0.6)))
                wrong = words[lost:] if random.random() < 0.5 else words[:-lost]
            case "reordered":
                width = random.randint(1, 3)
                parts = [words[start : start + width] for start in range(0, len(words), width)]
                random.shuffle(parts)
                wrong = [word for part in parts for word in part]
            case "replaced":
                share = random.uniform(0.25, 0.6)
                wrong = [random.choice(vocabulary) if random.random() < share else word for word in words]
            case "appended":
                wrong = [*words, *other[: max(1, len(other) // 2)]]
            case "joined":
                wrong = [*words[:half], *other[len(other) // 2 :]]
        result.append(glue.join(wrong))
    return result


def logistic_regression(
    features: npt.NDArray[np.float64], labels: npt.NDArray[np.float64], ridge: float = 1.0, iterations: int = 25
) -> npt.NDArray[np.float64]:
    """Returns the intercept and the weights [1 + features] that maximise the log likelihood minus a ridge penalty.

    `features` [examples, features] should have the same scale. `labels` [examples] are 1 or 0. Newton's method makes at
    most `iterations` steps. The penalty is `ridge` / 2 times the sum of the squared weights, without the intercept.
    """
    inputs = np.column_stack((np.ones(len(features)), features))
    weights = np.zeros(inputs.shape[1])
    penalty = np.full(len(weights), ridge)
    penalty[0] = 1e-6
    for _ in range(iterations):
        predicted = 1 / (1 + np.exp(-np.clip(inputs @ weights, -30, 30)))
        gradient = inputs.T @ (labels - predicted) - penalty * weights
        hessian = (inputs * (predicted * (1 - predicted))[:, None]).T @ inputs + np.diag(penalty)
        step = np.linalg.solve(hessian, gradient)
        weights += step
        if np.abs(step).max() < 1e-8:
            break
    return weights
