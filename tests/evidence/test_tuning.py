"""The registered rules of the law that tunes itself, and the laws it is compared with."""

import pytest
import torch
import tuning

from bellmask.diffusion.progress import NUM_ROWS, RATES, UNIFORM_SHARE
from bellmask.diffusion.theory import bell_test

RATE = torch.tensor(RATES, dtype=torch.float64)


@pytest.mark.parametrize(
    ("law", "mean"),
    [(tuning.EntropyRate, 2 / 3), (tuning.LossSecondMoment, 3 / 4)],
)
def test_rivals_draw_what_they_are_named_for(law, mean):
    """An NLL in proportion to t: entropy rate t, loss t^2, up to the uniform share and the bins."""
    law = law()
    assert law.mean == pytest.approx(0.5)
    law.update(RATE[:, None].expand(-1, NUM_ROWS))
    assert law.mean == pytest.approx((1 - UNIFORM_SHARE) * mean + UNIFORM_SHARE / 2, abs=2e-3)
    t = torch.linspace(0.001, 0.999, 99, dtype=torch.float64)
    assert float(law.pdf(t).min()) >= UNIFORM_SHARE
    torch.testing.assert_close(law.cdf(law.icdf(t)), t, rtol=0, atol=1e-9)
    assert not bell_test(law).is_bell_shaped


def variant(nll, ratio=None, at_zero=3.0):
    found = None if ratio is None else {"mean": ratio}
    return {"nll": nll, "at_zero": [at_zero] * 3, "comparison": {"speed_up": found}, "law": None}


def judged(own, **others):
    fixed = {name: variant(2.0, 1.0) for name in tuning.FIXED}
    fixed["base"]["comparison"] = None
    fixed |= {"bell": variant(1.9, 2.0)}
    return tuning.judge({**fixed, **others, "progress": own}, "progress")


def test_the_registered_rules():
    assert judged(variant(1.9, 1.91)) == [True, True, True]
    assert judged(variant(1.9, 1.89)) == [False, True, True]
    assert judged(variant(1.9, 2.0, at_zero=3.03)) == [True, True, False]
    loses = {"bell": variant(2.1)}
    assert judged(variant(2.005), **loses) == [True, True, True]  # the base's NLL, nearly
    assert judged(variant(2.02), **loses) == [False, True, True]
    assert judged(variant(2.1), **loses) == [False, False, True]
