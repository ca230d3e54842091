"""What a draft learns, against float64 and against the same computation without chunks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from distill.losses import acceptance, forward_kl, sum_over_chunks

Loss = Callable[[Tensor, Tensor], Tensor]
VOCAB = 50
NUM_TOKENS = 7
HIDDEN = 5


def random_logits(seed: int, rows: int, spread: float = 3.0, vocab: int = VOCAB) -> Tensor:
    return spread * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


def peak(token: int, height: float = 1e4) -> Tensor:
    """Logits of a distribution that is one token, as certain as float32 gets."""
    return torch.full((1, VOCAB), -height).index_fill_(1, torch.tensor(token), height)


def one_hot(token: int) -> Tensor:
    return torch.full((1, VOCAB), -torch.inf).index_fill_(1, torch.tensor(token), 0.0)


IDENTICAL = random_logits(2, 4)
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
    "some tokens ruled out by both": (random_logits(6, 3).index_fill(1, torch.tensor([0, 9]), -torch.inf),) * 2,
}
REDUCED = torch.arange(1, VOCAB, 3)


def reference(loss: str, log_p: Tensor, draft_logits: Tensor) -> tuple[Tensor, Tensor]:
    """Loss per row and its gradient with respect to the draft's logits, from the formulas, in float64."""
    log_q = draft_logits.log_softmax(-1)
    p, q = log_p.exp(), log_q.exp()
    if loss == "forward_kl":
        terms = torch.where(p > 0, p * (log_p - log_q), 0.0)
        # for p that need not sum to one
        return terms.sum(-1), q * p.sum(-1, keepdim=True) - p
    # where p = q the derivative jumps; a tie counts half, as torch.minimum does
    below = (q < p) + 0.5 * (q == p)
    return torch.minimum(p, q).sum(-1), q * (below - (below * q).sum(-1, keepdim=True))


def computed(loss: str, log_p: Tensor, draft_logits: Tensor) -> tuple[Tensor, Tensor]:
    logits = draft_logits.clone().requires_grad_()
    values = {"forward_kl": forward_kl, "acceptance": acceptance}[loss](log_p, logits.log_softmax(-1))
    values.sum().backward()
    assert logits.grad is not None
    return values.detach(), logits.grad


@pytest.mark.parametrize("reduced", [False, True], ids=["whole", "reduced"])
@pytest.mark.parametrize("rows", list(ROWS))
@pytest.mark.parametrize("loss", ["forward_kl", "acceptance"])
def test_value_and_gradient_agree_with_float64(loss: str, rows: str, reduced: bool) -> None:
    columns = REDUCED if reduced else torch.arange(VOCAB)
    teacher, draft = ROWS[rows]
    draft = draft[:, columns]
    value, gradient = computed(loss, teacher.log_softmax(-1)[:, columns], draft)
    true_value, true_gradient = reference(loss, teacher.double().log_softmax(-1)[:, columns], draft.double())
    torch.testing.assert_close(value.double(), true_value, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(gradient.double(), true_gradient, rtol=1e-5, atol=2e-6)


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


# --- sum_over_chunks --------------------------------------------------------------------------------------


class Problem:
    """Hidden states, a head, and a loss that differs from token to token."""

    def __init__(self, dtype: torch.dtype = torch.float32, num_tokens: int = NUM_TOKENS, vocab: int = VOCAB) -> None:
        generator = torch.Generator().manual_seed(0)
        self.hidden = torch.randn(num_tokens, HIDDEN, generator=generator, dtype=dtype).requires_grad_()
        self.head = torch.randn(vocab, HIDDEN, generator=generator, dtype=dtype).requires_grad_()
        self.log_p = (2 * torch.randn(num_tokens, vocab, generator=generator, dtype=dtype)).log_softmax(-1)

    def loss(self, logits: Tensor, tokens: slice) -> tuple[Tensor, Tensor]:
        log_p, log_q = self.log_p[tokens], logits.log_softmax(-1)
        loss = forward_kl(log_p, log_q).sum()
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
