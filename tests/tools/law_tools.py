"""What the tests of time laws share: the same laws by scipy."""

import numpy as np
import torch
from scipy import stats


def float64(values):
    return torch.tensor(values, dtype=torch.float64)


def scipy_gaussian(mu, sigma):
    """The Gaussian, truncated to [0, 1]."""
    return stats.truncnorm((0 - mu) / sigma, (1 - mu) / sigma, loc=mu, scale=sigma)


class scipy_laplace:
    """The Laplace law, truncated to [0, 1]."""

    def __init__(self, mu, b):
        self.law = stats.laplace(np.clip(mu, 0, 1), b)  # a peak outside gives the law of the end

    def cdf(self, t):
        return (self.law.cdf(t) - self.law.cdf(0)) / (self.law.cdf(1) - self.law.cdf(0))

    def pdf(self, t):
        return self.law.pdf(t) / (self.law.cdf(1) - self.law.cdf(0))
