"""Each divergence against its sum written out, values and gradients, and what it has to be by its definition."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from models.errors import UserError
from train.divergences import Divergence, acceptance, agreement

ROWS, VOCAB, ETA = 9, 6, 3.0
EXACT = {"atol": 1e-12, "rtol": 1e-12}
NAMES = ["cross_entropy", "soft_cross_entropy", "kl", "reverse_kl", "jsd", "tvd", "lk", "lk_hybrid"]


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


DRAFT, TARGET = 2 * randn(ROWS, VOCAB), 2 * randn(ROWS, VOCAB, seed=1)
LABELS = torch.tensor([0, 5, -1, 3, 2, -1, 1, 1, 4])


def law(logits: list[float], temperature: float) -> list[float]:
    powers = [math.exp(x / temperature) for x in logits]
    return [x / sum(powers) for x in powers]


def kl(p: list[float], q: list[float]) -> float:
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


def by_loop(name: str, draft: list[float], target: list[float], label: int, temperature: float) -> float:
    p, q = law(target, 1.0), law(draft, 1.0)
    warm_p, warm_q = law(target, temperature), law(draft, temperature)
    middle = [(a + b) / 2 for a, b in zip(warm_p, warm_q, strict=True)]
    alpha = sum(map(min, p, q))
    share = math.exp(-ETA * alpha)
    return {
        "cross_entropy": -math.log(q[label]) if label >= 0 else 0.0,
        "soft_cross_entropy": -(temperature**2) * sum(a * math.log(b) for a, b in zip(warm_p, warm_q, strict=True)),
        "kl": temperature**2 * kl(warm_p, warm_q),
        "reverse_kl": temperature**2 * kl(warm_q, warm_p),
        "jsd": temperature**2 * 0.5 * (kl(warm_p, middle) + kl(warm_q, middle)),
        "tvd": 1 - alpha,
        "lk": -math.log(alpha),
        "lk_hybrid": share * kl(p, q) + (1 - share) * (1 - alpha),
    }[name]


@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("name", NAMES)
def test_a_divergence_is_the_sum_written_out(name: str, temperature: float) -> None:
    found = Divergence({name: 0.7}, temperature, ETA)(DRAFT, TARGET, LABELS)
    expected = [
        0.7 * by_loop(name, d, t, label, temperature)
        for d, t, label in zip(DRAFT.tolist(), TARGET.tolist(), LABELS.tolist(), strict=True)
    ]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), **EXACT)


@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("name", [name for name in NAMES if name != "lk_hybrid"])
def test_a_gradient_is_that_of_the_sum_written_out(name: str, temperature: float) -> None:
    """By central differences. The share of lk_hybrid is held fixed, which differences cannot do."""
    draft, step = DRAFT.clone().requires_grad_(), 1e-6
    divergence = Divergence({name: 1.0}, temperature, ETA)
    (grad,) = torch.autograd.grad(divergence(draft, TARGET, LABELS).sum(), draft)
    for row in range(ROWS):
        for i in range(VOCAB):
            values = []
            for sign in (1, -1):
                moved = DRAFT[row].tolist()
                moved[i] += sign * step
                values.append(by_loop(name, moved, TARGET[row].tolist(), int(LABELS[row]), temperature))
            assert float(grad[row, i]) == pytest.approx((values[0] - values[1]) / (2 * step), abs=1e-7)
    assert grad.abs().max() > 0.05


def test_the_share_of_the_hybrid_has_no_gradient() -> None:
    draft = DRAFT.clone().requires_grad_()
    (found,) = torch.autograd.grad(Divergence({"lk_hybrid": 1.0}, lk_eta=ETA)(draft, TARGET, LABELS).sum(), draft)
    log_q, log_p = draft.log_softmax(-1), TARGET.log_softmax(-1)
    share = torch.exp(-ETA * acceptance(log_q, log_p)).detach()
    written = share * (log_p.exp() * (log_p - log_q)).sum(-1)
    written = written + (1 - share) * 0.5 * (log_p.exp() - log_q.exp()).abs().sum(-1)
    (expected,) = torch.autograd.grad(written.sum(), draft)
    torch.testing.assert_close(found, expected, **EXACT)


def test_temperature_keeps_the_size_of_the_gradient() -> None:
    """At high temperatures T²·KL tends to half the squared distance of the centred logits over Vd (1503.02531)."""
    draft = DRAFT.clone().requires_grad_()
    (grad,) = torch.autograd.grad(Divergence({"kl": 1.0}, temperature=1e4)(draft, TARGET, LABELS).sum(), draft)
    difference = DRAFT - TARGET
    centred = (difference - difference.mean(-1, keepdim=True)) / VOCAB
    torch.testing.assert_close(grad, centred, atol=1e-3, rtol=1e-2)


@pytest.mark.parametrize("name", [name for name in NAMES if "cross_entropy" not in name])
def test_equal_laws_have_no_divergence(name: str) -> None:
    draft = (TARGET + 17.0).requires_grad_()  # a constant changes nothing
    found = Divergence({name: 1.0}, 2.0)(draft, TARGET, LABELS)
    torch.testing.assert_close(found, torch.zeros_like(found), atol=1e-12, rtol=0)
    assert (Divergence({name: 1.0}, 2.0)(DRAFT, TARGET, LABELS) > 1e-3).all()


@pytest.mark.parametrize(
    "weights", [{"cross_entropy": 0.4, "kl": 0.9, "soft_cross_entropy": 0.2}, {"cross_entropy": 2.0}]
)
def test_the_gradient_that_is_written_out_is_autograds(weights: dict[str, float]) -> None:
    """Of a sum whose rows weigh differently; the laws that are handed out are those of the logits."""
    draft, scale = DRAFT.clone().requires_grad_(), randn(ROWS, seed=2)
    found, q, p = Divergence(weights).compared(draft, TARGET, LABELS)
    (grad,) = torch.autograd.grad((scale * found).sum(), draft)
    rows = [-(TARGET.softmax(-1) * draft.log_softmax(-1)).sum(-1)]
    rows.append(rows[0] + (TARGET.softmax(-1) * TARGET.log_softmax(-1)).sum(-1))
    rows.append(torch.where(LABELS >= 0, -draft.log_softmax(-1)[torch.arange(ROWS), LABELS], 0.0))
    named = dict(zip(("soft_cross_entropy", "kl", "cross_entropy"), rows, strict=True))
    total = sum(weight * named[name] for name, weight in weights.items())
    torch.testing.assert_close(found, total, **EXACT)
    torch.testing.assert_close(grad, torch.autograd.grad((scale * total).sum(), draft)[0], **EXACT)
    for laws in ((q, p), Divergence({"tvd": 1.0}).compared(draft, TARGET, LABELS)[1:]):
        torch.testing.assert_close(laws, (DRAFT.softmax(-1), TARGET.softmax(-1)), **EXACT)
        assert not any(law.requires_grad for law in laws)


def test_agreement_is_that_of_first_choices() -> None:
    q, p = DRAFT.softmax(-1), TARGET.softmax(-1)
    found = agreement(q, p)
    assert torch.equal(found, DRAFT.argmax(-1) == TARGET.argmax(-1)) and 0 < found.sum() < ROWS
    assert torch.equal(agreement(q.view(3, 3, VOCAB), p.view(3, 3, VOCAB)), found.view(3, 3))


def test_weights_add_up() -> None:
    both = Divergence({"kl": 0.3, "tvd": 2.0, "lk": 0.0})(DRAFT, TARGET, LABELS)
    parts = [Divergence({name: 1.0})(DRAFT, TARGET, LABELS) for name in ("kl", "tvd")]
    torch.testing.assert_close(both, 0.3 * parts[0] + 2.0 * parts[1], **EXACT)


def test_far_apart_laws_have_finite_values_and_gradients() -> None:
    """What underflows as a probability does not as a logarithm: the chance of acceptance is e^−200 here."""
    draft = torch.tensor([[0.0, 200.0]], requires_grad=True)
    loss = Divergence({"lk": 1.0})(draft, torch.tensor([[200.0, 0.0]]), torch.tensor([0]))
    assert loss.item() == pytest.approx(200 - math.log(2))
    (grad,) = torch.autograd.grad(loss.sum(), draft)
    torch.testing.assert_close(grad, torch.tensor([[-0.5, 0.5]]))


def test_half_precision_logits_are_compared_in_float32() -> None:
    found = Divergence({"kl": 1.0})(DRAFT.bfloat16(), TARGET.bfloat16(), LABELS)
    assert found.dtype == torch.float32
    exact = Divergence({"kl": 1.0})(DRAFT.bfloat16().double(), TARGET.bfloat16().double(), LABELS)
    torch.testing.assert_close(found.double(), exact, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("weights", "temperature", "said"),
    [({"klx": 1.0}, 1.0, "has 'klx': choose from"), ({}, 1.0, "is empty"), ({"kl": 1.0}, 0.0, "temperature is 0.0")],
)
def test_senseless_settings_are_refused(weights: dict[str, float], temperature: float, said: str) -> None:
    with pytest.raises(UserError, match=said):
        Divergence(weights, temperature)
