"""Logistic regression, which turns the scores of a pair into the probability that the pair is good."""

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


def logistic_regression(features: Floats, labels: Floats, ridge: float = 1.0, iterations: int = 25) -> Floats:
    """Returns the intercept and the weights [1 + features] that maximise the likelihood minus a ridge penalty.

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
