"""What a draft learns, against float64 and against the same computation without chunks."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from decode import costs
from distill.losses import (
    LOG_ZERO,
    acceptance,
    block_efficiency,
    cross_entropy,
    forward_kl,
    jsd,
    lk,
    negative_log_acceptance,
    reverse_kl,
    sum_over_chunks,
    total_variation,
    with_tail,
)

Loss = Callable[[Tensor, Tensor], Tensor]
VOCAB = 50
NUM_TOKENS = 7
HIDDEN = 5

LOSSES: dict[str, Loss] = {
    "forward_kl": forward_kl,
    "reverse_kl": reverse_kl,
    "jsd": jsd,
    "jsd, mostly forward": partial(jsd, beta=0.1),
    "jsd, mostly reverse": partial(jsd, beta=0.9),
    "acceptance": acceptance,
    "tv": total_variation,
    "nla": negative_log_acceptance,
    "lk": lk,
    "lk, slow": partial(lk, eta=0.5),
}
DIVERGENCES = [name for name in LOSSES if name.startswith(("forward", "reverse", "jsd", "tv"))]


def random_logits(seed: int, rows: int, spread: float = 3.0, vocab: int = VOCAB) -> Tensor:
    return spread * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


def peak(token: int, height: float = 1e4) -> Tensor:
    """Logits of a distribution that is one token, as certain as float32 gets."""
    return torch.full((1, VOCAB), -height).index_fill_(1, torch.tensor(token), height)


def one_hot(token: int) -> Tensor:
    return torch.full((1, VOCAB), -torch.inf).index_fill_(1, torch.tensor(token), 0.0)


IDENTICAL = random_logits(2, 4)
EVEN, ODD = torch.arange(0, VOCAB, 2), torch.arange(1, VOCAB, 2)
# name: the teacher's logits and the draft's
ROWS = {
    "ordinary": (random_logits(0, 20), random_logits(1, 20)),
    "identical": (IDENTICAL, IDENTICAL.clone()),
    "flat": (torch.zeros(1, VOCAB), torch.zeros(1, VOCAB)),
    "saturated, agreeing": (peak(3), peak(3)),
    "saturated, disagreeing": (peak(3), peak(4)),
    "saturated teacher": (peak(3), random_logits(3, 1)),
    "saturated draft": (random_logits(4, 1), peak(3)),
    "one-hot teacher": (one_hot(3), random_logits(5, 1)),
    "one-hot teacher, saturated draft": (one_hot(3), peak(3)),
    "one-hot teacher, draft sure of another": (one_hot(3), peak(4)),
    "some tokens ruled out by both": (random_logits(6, 3).index_fill(1, torch.tensor([0, 9]), -torch.inf),) * 2,
    "disjoint": (
        random_logits(7, 3).index_fill(1, ODD, -torch.inf),
        random_logits(8, 3).index_fill(1, EVEN, -1e4),
    ),
    "disjoint, ruled out": (
        random_logits(7, 3).index_fill(1, ODD, -torch.inf),
        random_logits(8, 3).index_fill(1, EVEN, -torch.inf),
    ),
}
REDUCED = torch.arange(1, VOCAB, 3)


def reference(loss: str, log_p: Tensor, draft_logits: Tensor) -> tuple[Tensor, Tensor]:
    """Loss per row and its gradient with respect to the draft's logits, from the formulas, in float64.

    With q the softmax of the logits, the gradient of L is q (g - sum_v q g) where g = dL/dq. What is called pull below
    is q g, which stays finite where g does not.
    """
    log_q = draft_logits.log_softmax(-1)
    p, q = log_p.exp(), log_q.exp()
    # where p = q the derivative of the minimum jumps; a tie counts half, as torch.minimum does
    below = (q < p) + 0.5 * (q == p)
    alpha = torch.minimum(p, q).sum(-1)
    # the logarithm of nothing is LOG_ZERO, and does not move
    stuck = log_q.isinf()
    log_p, log_q = log_p.masked_fill(log_p.isinf(), LOG_ZERO), log_q.masked_fill(stuck, LOG_ZERO)
    kl, kl_pull = (p * (log_p - log_q)).sum(-1), -p.masked_fill(stuck, 0.0)
    if loss == "forward_kl":
        value, pull = kl, kl_pull
    elif loss == "reverse_kl":
        ratio = log_q - log_p
        value, pull = (q * ratio).sum(-1), q * (ratio + 1)
    elif loss.startswith("jsd"):
        beta = {"jsd": 0.5, "jsd, mostly forward": 0.1, "jsd, mostly reverse": 0.9}[loss]
        m = beta * p + (1 - beta) * q
        of_p, of_q = torch.where(p > 0, p * (p / m).log(), 0.0), torch.where(q > 0, q * (q / m).log(), 0.0)
        value, pull = beta * of_p.sum(-1) + (1 - beta) * of_q.sum(-1), (1 - beta) * of_q
    elif loss == "acceptance":
        value, pull = alpha, q * below
    elif loss == "tv":
        value, pull = 1 - alpha, -q * below
    elif loss == "nla":
        # in logarithms: the sum of the minima may be less than float64 can hold
        log_minimum = torch.minimum(log_p, log_q)
        log_alpha = log_minimum.logsumexp(-1)
        below = ((log_q < log_p) + 0.5 * (log_q == log_p)).masked_fill(stuck, 0.0)
        value, pull = -log_alpha, -(log_minimum - log_alpha.unsqueeze(-1)).exp() * below
    else:
        eta = {"lk": 3.0, "lk, slow": 0.5}[loss]
        lam = (-eta * alpha).exp()
        value = lam * kl + (1 - lam) * (1 - alpha)
        pull = lam.unsqueeze(-1) * kl_pull - (1 - lam).unsqueeze(-1) * q * below
    return value, pull - q * pull.sum(-1, keepdim=True)


def computed(loss: Loss, log_p: Tensor, draft_logits: Tensor) -> tuple[Tensor, Tensor]:
    logits = draft_logits.clone().requires_grad_()
    values = loss(log_p, logits.log_softmax(-1))
    values.sum().backward()
    assert logits.grad is not None
    return values.detach(), logits.grad


@pytest.mark.parametrize("reduced", [False, True], ids=["whole", "reduced"])
@pytest.mark.parametrize("rows", list(ROWS))
@pytest.mark.parametrize("loss", list(LOSSES))
def test_value_and_gradient_agree_with_float64(loss: str, rows: str, reduced: bool) -> None:
    columns = REDUCED if reduced else torch.arange(VOCAB)
    teacher, draft = ROWS[rows]
    draft = draft[:, columns]
    value, gradient = computed(LOSSES[loss], teacher.log_softmax(-1)[:, columns], draft)
    assert value.isfinite().all()
    assert gradient.isfinite().all()
    true_value, true_gradient = reference(loss, teacher.double().log_softmax(-1)[:, columns], draft.double())
    # a loss of many nats, in float32, rounds by as much as that much does
    atol = 2e-6 + 2e-7 * float(true_value.abs().max())
    torch.testing.assert_close(value.double(), true_value, rtol=1e-5, atol=atol)
    torch.testing.assert_close(gradient.double(), true_gradient, rtol=1e-5, atol=atol)


def test_the_references_gradient_is_that_of_its_value() -> None:
    """By differences, on rows where nothing ties; LK's weight is a constant, so its value alone does not tell."""
    teacher, draft = (logits.double() for logits in ROWS["ordinary"])
    for columns in (torch.arange(VOCAB), REDUCED):
        log_p, logits = teacher.log_softmax(-1)[:, columns], draft[:, columns]
        direction = random_logits(9, len(logits), 1e-6, len(columns)).double()
        for loss in LOSSES:
            ahead, behind = (reference(loss, log_p, logits + sign * direction)[0] for sign in (1, -1))
            slope = (reference(loss, log_p, logits)[1] * direction).sum(-1)
            agree = torch.isclose((ahead - behind) / 2, slope, rtol=1e-4, atol=1e-12).all()
            assert agree != loss.startswith("lk"), loss


def test_the_cases_are_hard_for_the_obvious_formulas() -> None:
    """The control: what one would write first gives NaN or infinity where the rows above are extreme."""

    def naive_kl(rows: str) -> Tensor:
        teacher, draft = ROWS[rows]
        log_p, log_q = teacher.log_softmax(-1), draft.log_softmax(-1)
        return (log_p.exp() * (log_p - log_q)).sum(-1)

    assert naive_kl("one-hot teacher").isnan().all()
    assert naive_kl("some tokens ruled out by both").isnan().all()
    teacher, draft = ROWS["saturated, disagreeing"]
    p, q = teacher.softmax(-1), draft.softmax(-1)
    assert (p * (p / q).log()).sum(-1).isnan().all()


def test_bounds() -> None:
    """0 <= alpha <= 1 and KL >= 0, up to rounding, from flat distributions to certain ones."""
    spreads = torch.logspace(-2, 3, 2000).unsqueeze(1)
    log_p = (spreads * random_logits(0, 2000, 1.0)).log_softmax(-1)
    log_q = (spreads.flip(0) * random_logits(1, 2000, 1.0)).log_softmax(-1)
    for one, other in [(log_p, log_q), (log_q, log_p), (log_p, log_p)]:
        alpha = acceptance(one, other)
        assert alpha.min() >= 0
        assert alpha.max() <= 1 + 1e-6
        assert forward_kl(one, other).min() >= -1e-5
    assert acceptance(log_p, log_q).min() < 0.01  # the controls: the rows reach both ends
    assert acceptance(log_p, log_p).min() > 1 - 1e-6
    # and without a p that sums to one, KL is negative for some
    assert forward_kl(log_p[:, REDUCED], log_q[:, REDUCED].log_softmax(-1)).min() < -0.1


def test_acceptance_is_one_minus_total_variation() -> None:
    teacher, draft = (logits.double() for logits in ROWS["ordinary"])
    p, q = teacher.softmax(-1), draft.softmax(-1)
    alpha = acceptance(teacher.log_softmax(-1), draft.log_softmax(-1))
    torch.testing.assert_close(alpha, 1 - 0.5 * (p - q).abs().sum(-1))


def test_a_reduced_vocabulary_never_overstates_acceptance() -> None:
    """It is what the whole vocabulary gives to a draft with no mass elsewhere: that draft is what proposes."""
    log_p = random_logits(0, 500).double().log_softmax(-1)
    log_q = random_logits(1, 500).double()[:, REDUCED].log_softmax(-1)
    extended = torch.full_like(log_p, -torch.inf).index_copy_(1, REDUCED, log_q)
    alpha = acceptance(log_p[:, REDUCED], log_q)
    torch.testing.assert_close(alpha, acceptance(log_p, extended), rtol=1e-14, atol=0)
    kept_mass = log_p[:, REDUCED].exp().sum(-1)
    assert (alpha <= kept_mass + 1e-12).all()
    # the control: p renormalised over the columns claims more, and more than the mass there is
    overstated = acceptance(log_p[:, REDUCED].log_softmax(-1), log_q)
    assert (overstated > alpha).all()
    assert (overstated > kept_mass).any()


def test_a_reduced_vocabulary_keeps_the_order_of_drafts_under_kl() -> None:
    """Not renormalising p shifts each row by a constant and scales it: the best q is p's share, as it should be."""
    log_p = random_logits(0, 50).double().log_softmax(-1)[:, REDUCED]
    mass = log_p.exp().sum(-1)
    best = log_p.log_softmax(-1)
    torch.testing.assert_close(forward_kl(log_p, best), torch.special.xlogy(mass, mass))
    others = random_logits(1, 50).double()[:, REDUCED].log_softmax(-1)
    assert (forward_kl(log_p, others) > forward_kl(log_p, best)).all()


# --- single losses ----------------------------------------------------------------------------------------


def test_jsd_knows_no_sides_at_one_half() -> None:
    log_p, log_q = (logits.double().log_softmax(-1) for logits in ROWS["ordinary"])
    torch.testing.assert_close(jsd(log_p, log_q), jsd(log_q, log_p), rtol=1e-12, atol=0)
    assert (jsd(log_p, log_q, 0.3) - jsd(log_q, log_p, 0.3)).abs().max() > 0.01  # the control
    torch.testing.assert_close(jsd(log_p, log_q, 0.3), jsd(log_q, log_p, 0.7), rtol=1e-12, atol=0)
    assert (jsd(log_p, log_q) < torch.tensor(2.0).log()).all()


def test_jsd_goes_as_forward_kl_near_0_and_as_reverse_kl_near_1() -> None:
    log_p, log_q = (random_logits(seed, 20, 1.0).double().log_softmax(-1) for seed in (0, 1))
    small = 1e-7
    forward, reverse = forward_kl(log_p, log_q), reverse_kl(log_p, log_q)
    torch.testing.assert_close(jsd(log_p, log_q, small) / small, forward, rtol=1e-5, atol=0)
    torch.testing.assert_close(jsd(log_p, log_q, 1 - small) / small, reverse, rtol=1e-5, atol=0)
    assert ((forward - reverse).abs() > 1e-3 * forward).all()  # the control
    torch.testing.assert_close(reverse, forward_kl(log_q, log_p), rtol=1e-12, atol=0)


def test_a_cold_start_moves_all_but_tv() -> None:
    """The teacher is sure of a token that the draft has never heard of."""
    log_p, draft = peak(3, 15.0).log_softmax(-1), random_logits(0, 1, 1.0)
    draft[:, 3] = -20.0
    pulls = {name: computed(LOSSES[name], log_p, draft)[1][0, 3] for name in ("tv", "nla", "lk", "forward_kl")}
    assert -1e-8 < pulls.pop("tv") < 0
    assert all(pull < -0.5 for pull in pulls.values()), pulls
    # and once they share most of their mass, TV moves it too
    assert computed(total_variation, log_p, draft.index_fill(1, torch.tensor(3), 3.0))[1][0, 3] < -0.1


def test_nla_still_moves_where_no_float_holds_what_is_shared() -> None:
    log_p, draft = peak(3).log_softmax(-1), peak(4, 400.0)
    value, gradient = computed(negative_log_acceptance, log_p, draft)
    assert value.item() == 800
    torch.testing.assert_close(gradient[0, 3], torch.tensor(-1.0))
    torch.testing.assert_close(gradient[0, 4], torch.tensor(1.0))
    assert acceptance(log_p, draft.log_softmax(-1)) == 0  # the control


def test_the_weight_of_lk_is_a_constant_to_the_gradient() -> None:
    teacher, draft = (logits.double() for logits in ROWS["ordinary"])
    log_p = teacher.log_softmax(-1)
    alpha = computed(acceptance, log_p, draft)[0]
    lam = (-3 * alpha).exp().unsqueeze(1)
    of_lk, of_kl, of_tv = (computed(each, log_p, draft)[1] for each in (lk, forward_kl, total_variation))
    torch.testing.assert_close(of_lk, lam * of_kl + (1 - lam) * of_tv, rtol=1e-12, atol=1e-15)

    def moving(log_p: Tensor, log_q: Tensor) -> Tensor:
        lam = (-3 * acceptance(log_p, log_q)).exp()
        return lam * forward_kl(log_p, log_q) + (1 - lam) * total_variation(log_p, log_q)

    assert (of_lk - computed(moving, log_p, draft)[1]).abs().max() > 1e-3  # the control
    of_kl = computed(partial(lk, eta=0.0), log_p, draft)[1]
    torch.testing.assert_close(of_kl, computed(forward_kl, log_p, draft)[1], rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("num_drafted", [1, 2, 5])
def test_block_efficiency_is_tokens_accepted_a_pass(num_drafted: int) -> None:
    alphas = torch.rand(8, num_drafted, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    alphas[:3, 0], alphas[2:5, -1], alphas[5, :], alphas[6, :] = 0.0, 0.0, 1.0, 0.0
    alphas.requires_grad_()
    losses = block_efficiency(alphas)
    expected = [-(costs.block_efficiency(row, num_drafted) - 1) / num_drafted for row in alphas.tolist()]
    torch.testing.assert_close(losses.detach(), torch.tensor(expected, dtype=torch.float64), rtol=1e-13, atol=0)
    losses.sum().backward()
    gradient = torch.zeros_like(alphas)
    for position in range(num_drafted):  # a later alpha counts only behind those before it
        without = alphas.detach().clone()
        without[:, position] = 1.0
        gradient[:, position] = -without.cumprod(1)[:, position:].sum(1) / num_drafted
    torch.testing.assert_close(alphas.grad, gradient, rtol=1e-12, atol=0)
    assert losses[5] == -1
    assert losses[6] == 0


def test_cross_entropy_leaves_out_what_the_draft_cannot_say() -> None:
    logits = random_logits(0, 5).requires_grad_()
    columns = torch.tensor([3, -1, 0, VOCAB - 1, -1])
    there = columns >= 0
    losses = cross_entropy(logits.log_softmax(-1), columns)
    expected = -logits.detach().log_softmax(-1)[there, columns[there]]
    torch.testing.assert_close(losses[there].detach(), expected)
    assert not losses[~there].any()
    losses.sum().backward()
    assert logits.grad is not None
    target = torch.nn.functional.one_hot(columns.clamp_min(0), VOCAB)
    torch.testing.assert_close(logits.grad, (logits.detach().softmax(-1) - target) * there.unsqueeze(1))


# --- the likeliest tokens and what is left ----------------------------------------------------------------

NUM_ROWS = 400


def mixed(seed: int, vocab: int = VOCAB) -> Tensor:
    """Rows from nearly flat to nearly certain, float64."""
    spreads = torch.logspace(-1, 1.5, NUM_ROWS, dtype=torch.float64).unsqueeze(1)
    order = torch.randperm(NUM_ROWS, generator=torch.Generator().manual_seed(seed))
    return spreads[order] * random_logits(seed, NUM_ROWS, 1.0, vocab).double()


def top(log_p: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """The k likeliest tokens' ids and log p, and the log of the mass of the others."""
    values, ids = log_p.topk(k, dim=-1)
    return ids, values, log_p.scatter(-1, ids, -torch.inf).logsumexp(-1)


@pytest.mark.parametrize("k", [1, 4, 20, VOCAB - 1])
def test_seen_coarsely_no_divergence_is_larger(k: int) -> None:
    log_p, log_q = mixed(0).log_softmax(-1), mixed(1).log_softmax(-1)
    ids, top_log_p, log_tail = top(log_p, k)
    seen_p, seen_q = with_tail(top_log_p, log_tail, log_q, ids)
    for seen in (seen_p, seen_q):
        assert seen.shape == (NUM_ROWS, k + 1)
        torch.testing.assert_close(seen.exp().sum(-1), torch.ones(NUM_ROWS, dtype=torch.float64))
    for name in DIVERGENCES:
        coarse, full = LOSSES[name](seen_p, seen_q), LOSSES[name](log_p, log_q)
        assert (coarse <= full + 1e-9).all(), name
        if k <= 20:
            assert (coarse < 0.99 * full).float().mean() > 0.3, name  # the control: something is lost


@pytest.mark.parametrize("columns", [torch.arange(VOCAB), REDUCED], ids=["whole", "reduced"])
@pytest.mark.parametrize("k", [1, 4, 20, VOCAB - 1])
def test_the_true_acceptance_lies_in_the_interval(k: int, columns: Tensor) -> None:
    log_p, log_q = mixed(0).log_softmax(-1), mixed(1)[:, columns].log_softmax(-1)
    column_of = torch.full((VOCAB,), -1)
    column_of[columns] = torch.arange(len(columns))
    alpha = acceptance(log_p[:, columns], log_q)
    ids, top_log_p, log_tail = top(log_p, k)

    def interval(ids: Tensor) -> tuple[Tensor, Tensor]:
        seen_p, seen_q = with_tail(top_log_p, log_tail, log_q, column_of[ids])
        return acceptance(seen_p[:, :-1], seen_q[:, :-1]), acceptance(seen_p, seen_q)

    low, high = interval(ids)
    assert (low <= alpha + 1e-12).all()
    assert (alpha <= high + 1e-12).all()
    if k <= 20:
        assert ((low + 1e-6 < alpha) & (alpha < high - 1e-6)).float().mean() > 0.2
    # the control: of other tokens it is another interval
    low, high = interval(ids.roll(1, 0))
    assert ((alpha < low - 1e-6) | (alpha > high + 1e-6)).float().mean() > 0.05


@pytest.mark.parametrize("loss", list(LOSSES))
def test_all_tokens_kept_are_the_whole_distribution(loss: str) -> None:
    log_p, draft = ROWS["ordinary"][0].double().log_softmax(-1), ROWS["ordinary"][1].double()
    ids, top_log_p, log_tail = top(log_p, VOCAB)
    assert (log_tail == -torch.inf).all()

    def of_kept(_: Tensor, log_q: Tensor) -> Tensor:
        return LOSSES[loss](*with_tail(top_log_p, log_tail, log_q, ids))

    for kept, whole in zip(computed(of_kept, log_p, draft), computed(LOSSES[loss], log_p, draft), strict=True):
        torch.testing.assert_close(kept, whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("loss", list(LOSSES))
def test_the_gradient_through_the_tail_agrees_with_float64(loss: str) -> None:
    """The reference sums the draft's probabilities beyond the likeliest tokens one by one."""
    k = 4
    teacher, draft = ROWS["ordinary"]
    ids, top_log_p, log_tail = top(teacher.log_softmax(-1), k)

    def of_kept(_: Tensor, log_q: Tensor) -> Tensor:
        return LOSSES[loss](*with_tail(top_log_p, log_tail, log_q, ids))

    _, gradient = computed(of_kept, teacher, draft)
    logits = draft.double().requires_grad_()
    q = logits.softmax(-1)
    others = torch.ones_like(q, dtype=torch.bool).scatter(-1, ids, False)
    log_q = torch.cat([q.gather(-1, ids), q[others].view(len(q), -1).sum(-1, keepdim=True)], dim=-1).log()
    LOSSES[loss](torch.cat([top_log_p, log_tail.unsqueeze(1)], dim=-1).double(), log_q).sum().backward()
    assert logits.grad is not None
    assert logits.grad.abs().max() > 0.01
    torch.testing.assert_close(gradient.double(), logits.grad, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("loss", list(LOSSES))
def test_likely_tokens_that_the_draft_lacks_are_left_out(loss: str) -> None:
    """As those of a reduced vocabulary are where the whole distribution is known."""
    teacher, log_q = ROWS["ordinary"][0], ROWS["ordinary"][1].log_softmax(-1)
    ids, top_log_p, log_tail = top(teacher.log_softmax(-1), 5)
    draft_lacks_it = log_q.scatter(-1, ids[:, :1], -torch.inf)
    of_others = with_tail(top_log_p[:, 1:], log_tail, draft_lacks_it, ids[:, 1:])
    lacking = with_tail(top_log_p, log_tail, draft_lacks_it, ids.index_fill(1, torch.tensor(0), -1))
    torch.testing.assert_close(LOSSES[loss](*lacking), LOSSES[loss](*of_others))


@pytest.mark.parametrize("loss", list(LOSSES))
def test_nothing_left_on_either_side_is_no_end_of_finiteness(loss: str) -> None:
    draft = random_logits(0, 3, vocab=2)
    top_log_p = torch.tensor([[-0.5, -1.5, -2.0]]).repeat(3, 1)
    columns = torch.tensor(
        [
            [1, -1, 0],  # the draft has no other tokens
            [-1, -1, -1],  # the draft has none of them
            [-1, 1, -1],
        ]
    )
    for log_tail in (torch.full((3,), -torch.inf), (1 - top_log_p.exp().sum(-1)).log()):

        def of_kept(_: Tensor, log_q: Tensor, log_tail: Tensor = log_tail) -> Tensor:
            return LOSSES[loss](*with_tail(top_log_p, log_tail, log_q, columns))

        value, gradient = computed(of_kept, top_log_p, draft)
        assert value.isfinite().all()
        assert gradient.isfinite().all()


# --- sum_over_chunks --------------------------------------------------------------------------------------


class Problem:
    """Hidden states, a head, and a loss that differs from token to token."""

    def __init__(
        self,
        dtype: torch.dtype = torch.float32,
        num_tokens: int = NUM_TOKENS,
        vocab: int = VOCAB,
        function: Loss = forward_kl,
    ) -> None:
        self.function = function
        generator = torch.Generator().manual_seed(0)
        self.hidden = torch.randn(num_tokens, HIDDEN, generator=generator, dtype=dtype).requires_grad_()
        self.head = torch.randn(vocab, HIDDEN, generator=generator, dtype=dtype).requires_grad_()
        self.log_p = (2 * torch.randn(num_tokens, vocab, generator=generator, dtype=dtype)).log_softmax(-1)

    def loss(self, logits: Tensor, tokens: slice) -> tuple[Tensor, Tensor]:
        log_p, log_q = self.log_p[tokens], logits.log_softmax(-1)
        loss = self.function(log_p, log_q).sum()
        return loss, torch.stack([loss.detach(), acceptance(log_p, log_q).sum()])

    def chunked(self, chunk_size: int, **changes: Any) -> tuple[Tensor, Tensor]:
        return sum_over_chunks(self.loss, changes.get("hidden", self.hidden), self.head, chunk_size)

    def whole(self) -> tuple[Tensor, Tensor]:
        return self.loss(self.hidden @ self.head.T, slice(0, len(self.hidden)))

    def gradients(self, loss: Tensor) -> tuple[Tensor | None, Tensor | None]:
        self.hidden.grad = self.head.grad = None
        loss.backward()
        return self.hidden.grad, self.head.grad


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("chunk_size", [1, 3, NUM_TOKENS, NUM_TOKENS + 100])
def test_chunks_change_nothing(chunk_size: int, dtype: torch.dtype, tolerance: float) -> None:
    problem = Problem(dtype)
    (loss, metrics), (true_loss, true_metrics) = problem.chunked(chunk_size), problem.whole()
    torch.testing.assert_close(loss, true_loss, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(metrics, true_metrics.detach(), rtol=tolerance, atol=tolerance)
    assert not metrics.requires_grad
    pairs = zip(problem.gradients(loss), problem.gradients(true_loss), strict=True)
    for gradient, true_gradient in pairs:
        assert true_gradient is not None
        assert true_gradient.abs().max() > 0.1
        torch.testing.assert_close(gradient, true_gradient, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("chunk_size", [1, 3, NUM_TOKENS, NUM_TOKENS + 100])
@pytest.mark.parametrize("loss", list(LOSSES))
def test_chunks_change_no_loss(loss: str, chunk_size: int) -> None:
    problem = Problem(torch.float64, function=LOSSES[loss])
    (value, _), (true_value, _) = problem.chunked(chunk_size), problem.whole()
    torch.testing.assert_close(value, true_value, rtol=1e-12, atol=1e-12)
    for gradient, true_gradient in zip(problem.gradients(value), problem.gradients(true_value), strict=True):
        assert true_gradient is not None
        assert true_gradient.abs().max() > 0.01
        torch.testing.assert_close(gradient, true_gradient, rtol=1e-12, atol=1e-12)


def test_each_chunk_is_told_which_tokens_it_has() -> None:
    """The control of the test above: with the teacher of other tokens, the sum is another."""
    problem = Problem(torch.float64)
    right = problem.chunked(3)[0]
    problem.log_p = problem.log_p.roll(3, dims=0)
    assert (problem.chunked(3)[0] - right).abs() > 0.1


def test_the_gradient_is_scaled_by_what_comes_after() -> None:
    problem = Problem(torch.float64)
    after = [0.37 * loss + 2.0 * problem.hidden.square().sum() for loss, _ in (problem.chunked(3), problem.whole())]
    for gradient, true_gradient in zip(*map(problem.gradients, after), strict=True):
        torch.testing.assert_close(gradient, true_gradient, rtol=1e-12, atol=1e-12)


def test_a_frozen_head_gets_no_gradient() -> None:
    problem = Problem(torch.float64)
    expected, _ = problem.gradients(problem.whole()[0])
    problem.head.requires_grad_(False)
    gradient, of_head = problem.gradients(problem.chunked(3)[0])
    assert of_head is None
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-12)


def test_a_head_learns_on_frozen_states() -> None:
    problem = Problem(torch.float64)
    _, expected = problem.gradients(problem.whole()[0])
    problem.hidden.requires_grad_(False)
    of_hidden, gradient = problem.gradients(problem.chunked(3)[0])
    assert of_hidden is None
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-12)


def test_rows_of_a_head_pass_the_gradient_on_to_the_whole_head() -> None:
    problem = Problem(torch.float64)
    whole = problem.head
    problem.log_p = problem.log_p[:, REDUCED]
    problem.head = whole[REDUCED]
    problem.chunked(3)[0].backward()
    assert whole.grad is not None
    touched = whole.grad.abs().sum(-1) > 0
    assert touched.nonzero().flatten().equal(REDUCED)


@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "no_grad"])
def test_an_evaluation_builds_no_graph(frozen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(torch.float64)
    expected, _ = problem.whole()
    if frozen:
        problem.hidden.requires_grad_(False)
        problem.head.requires_grad_(False)
    differentiated = []
    differentiate = torch.autograd.grad
    monkeypatch.setattr(torch.autograd, "grad", lambda *a, **k: differentiated.append(a) or differentiate(*a, **k))
    with torch.set_grad_enabled(frozen):
        loss, _ = problem.chunked(3)
    assert not loss.requires_grad
    assert not differentiated
    torch.testing.assert_close(loss, expected.detach())


@pytest.mark.parametrize("chunk_size", [1, 100])
def test_no_tokens_are_zeros_with_a_graph(chunk_size: int) -> None:
    """A batch without response tokens must not crash, nor leave another process waiting for its gradients."""
    problem = Problem(num_tokens=0)
    loss, metrics = problem.chunked(chunk_size)
    assert loss.requires_grad
    assert (loss.item(), metrics.tolist()) == (0.0, [0.0, 0.0])
    of_hidden, of_head = problem.gradients(loss)
    assert of_hidden is not None
    assert of_hidden.shape == (0, HIDDEN)
    assert of_head is not None
    assert of_head.shape == (VOCAB, HIDDEN)
    assert not of_head.any()


def test_states_of_less_precision_keep_their_dtype() -> None:
    problem = Problem()
    expected = problem.gradients(problem.whole()[0])
    problem.hidden = problem.hidden.detach().bfloat16().requires_grad_()
    gradients = problem.gradients(problem.chunked(3)[0])
    for gradient, true_gradient, dtype in zip(gradients, expected, (torch.bfloat16, torch.float32), strict=True):
        assert gradient is not None
        assert gradient.dtype == dtype
        assert true_gradient is not None
        assert (gradient.float() - true_gradient).norm() < 0.03 * true_gradient.norm()


class LargestTensor(TorchDispatchMode):
    """How many elements the largest tensor holds that any operation makes, in forward and backward passes."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.elements = max(self.elements, leaf.untyped_storage().nbytes() // leaf.itemsize)
        return out


def test_no_tensor_of_tokens_times_vocabulary_is_ever_made() -> None:
    # so that the head and the states are smaller than that by far, and a chunk's logits larger than either
    num_tokens, vocab, chunk_size = 320, 40, 8
    problem = Problem(num_tokens=num_tokens, vocab=vocab)
    saved: list[int] = []

    def loss(logits: Tensor, tokens: slice) -> tuple[Tensor, Tensor]:
        # the teacher's logits are made chunk by chunk too
        value = forward_kl((logits.detach() + 0.1).log_softmax(-1), logits.log_softmax(-1)).sum()
        return value, value.detach().unsqueeze(0)

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor.numel())
        return tensor

    def measure(compute: Callable[[], Tensor]) -> tuple[int, int]:
        saved.clear()
        with LargestTensor() as largest, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            problem.gradients(compute())
        return largest.elements, max(saved, default=0)

    bound = max(num_tokens * HIDDEN, vocab * HIDDEN, chunk_size * vocab)
    made, kept = measure(lambda: sum_over_chunks(loss, problem.hidden, problem.head, chunk_size)[0])
    assert made <= bound < num_tokens * vocab
    assert kept <= bound
    # the controls: both instruments see what the unchunked loss makes and keeps
    made, kept = measure(lambda: loss(problem.hidden @ problem.head.T, slice(0, num_tokens))[0])
    assert made >= num_tokens * vocab
    assert kept >= num_tokens * vocab
    made, _ = measure(lambda: sum_over_chunks(loss, problem.hidden, problem.head, num_tokens)[0])
    assert made >= num_tokens * vocab
