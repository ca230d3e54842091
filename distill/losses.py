"""What a draft learns: per-token losses on log-probabilities, and the chunked head that feeds them.

Pure torch, fp32 arithmetic. p is the teacher's distribution and q the draft's. With a reduced output vocabulary
the columns are the draft's ids and p is *not* renormalised over them, so that acceptance is never overstated.
"""

import math
from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

# stands for the logarithm of zero: exp of it is zero, in fp32 and fp64
LOG_ZERO = -1000.0

ChunkLoss = Callable[[Tensor, slice], tuple[Tensor, Tensor]]


def forward_kl(log_p: Float[Tensor, "tokens vocab"], log_q: Float[Tensor, "tokens vocab"]) -> Float[Tensor, " tokens"]:
    """KL(p | q) = sum_v p (log p - log q) per token (Hinton et al. 2015), in nats; 0 log 0 is 0."""
    return (log_p.exp() * (_finite(log_p) - _finite(log_q))).sum(dim=-1)


def reverse_kl(log_p: Float[Tensor, "tokens vocab"], log_q: Float[Tensor, "tokens vocab"]) -> Float[Tensor, " tokens"]:
    """KL(q | p) = sum_v q (log q - log p) per token (Gu et al. 2024, eq. 2), in nats.

    A token that the teacher rules out counts as one of log-probability `LOG_ZERO`: dear, and not without end.
    """
    log_q = _finite(log_q)
    return (log_q.exp() * (log_q - _finite(log_p))).sum(dim=-1)


def jsd(
    log_p: Float[Tensor, "tokens vocab"], log_q: Float[Tensor, "tokens vocab"], beta: float = 0.5
) -> Float[Tensor, " tokens"]:
    """beta KL(p | m) + (1 - beta) KL(q | m) with m = beta p + (1 - beta) q, per token (Agarwal et al. 2024, eq. 1).

    Args:
        log_p, log_q: as everywhere.
        beta: in (0, 1); near 0 it goes as forward KL, near 1 as reverse KL.
    """
    log_p, log_q = _finite(log_p), _finite(log_q)
    log_m = torch.logaddexp(log_p + math.log(beta), log_q + math.log1p(-beta))
    of_p = (log_p.exp() * (log_p - log_m)).sum(dim=-1)
    of_q = (log_q.exp() * (log_q - log_m)).sum(dim=-1)
    return beta * of_p + (1 - beta) * of_q


def acceptance(log_p: Float[Tensor, "tokens vocab"], log_q: Float[Tensor, "tokens vocab"]) -> Float[Tensor, " tokens"]:
    """Probability that a token drafted from q is accepted: sum_v min(p, q) = 1 - TV (Leviathan et al. 2023, eq. 3)."""
    shared: Tensor = torch.minimum(log_p, log_q).exp().sum(dim=-1)
    return shared


def total_variation(
    log_p: Float[Tensor, "tokens vocab"], log_q: Float[Tensor, "tokens vocab"]
) -> Float[Tensor, " tokens"]:
    """TV(p, q) = 1 - sum_v min(p, q) per token: the probability of a rejection (Zhou et al. 2024, section 3)."""
    return 1 - acceptance(log_p, log_q)


def negative_log_acceptance(
    log_p: Float[Tensor, "tokens vocab"], log_q: Float[Tensor, "tokens vocab"]
) -> Float[Tensor, " tokens"]:
    """-log sum_v min(p, q) per token. Unlike that of TV, its gradient does not vanish where p and q share little."""
    return -torch.minimum(_finite(log_p), _finite(log_q)).logsumexp(dim=-1)


def lk(
    log_p: Float[Tensor, "tokens vocab"], log_q: Float[Tensor, "tokens vocab"], eta: float = 3.0
) -> Float[Tensor, " tokens"]:
    """lam KL(p | q) + (1 - lam) TV(p, q) per token, where lam = exp(-eta alpha) of the same token is a constant.

    KL where little is accepted and TV has no gradient, TV where it counts.
    """
    tv = total_variation(log_p, log_q)
    lam = (-eta * (1 - tv.detach())).exp()
    return lam * forward_kl(log_p, log_q) + (1 - lam) * tv


def block_efficiency(alphas: Float[Tensor, "branches drafted"]) -> Float[Tensor, " branches"]:
    """-(1/gamma) sum_k prod_{j<=k} alpha_j: minus the tokens that a drafted branch is expected to get accepted.

    In units of gamma, the number of drafted tokens; alphas are each position's sum_v min(p, q).
    """
    return -alphas.cumprod(dim=1).mean(dim=1)


def cross_entropy(log_q: Float[Tensor, "tokens vocab"], columns: Int[Tensor, " tokens"]) -> Float[Tensor, " tokens"]:
    """-log q of the text's own token, given by its column; 0 where the draft has none for it (column -1)."""
    chosen = _finite(log_q).gather(-1, columns.clamp_min(0).unsqueeze(-1)).squeeze(-1)
    return torch.where(columns >= 0, -chosen, 0.0)


def with_tail(
    log_p: Float[Tensor, "tokens k"],
    log_tail: Float[Tensor, " tokens"],
    log_q: Float[Tensor, "tokens vocab"],
    columns: Int[Tensor, "tokens k"],
) -> tuple[Float[Tensor, "tokens k_plus_1"], Float[Tensor, "tokens k_plus_1"]]:
    """A teacher known by its k likeliest tokens and the mass of all others, and the draft seen in the same way.

    A last column holds what is left of either, p beyond the draft's vocabulary included. `acceptance` of all columns is
    the upper end of an interval that holds the true one, and of all but the last its lower end. Where the draft has the
    whole vocabulary, no divergence of such coarser distributions is larger than that of the full ones.

    Args:
        log_p: of the k likeliest tokens, not renormalised.
        log_tail: log of the mass of the others.
        log_q: of the draft.
        columns: the draft's column of each of the k, -1 where it has none: there p is left out.
    """
    padded = torch.nn.functional.pad(log_q, (0, 1), value=-torch.inf)  # a last column for what the draft has not
    columns = torch.where(columns < 0, log_q.shape[-1], columns)
    rest = padded.scatter(-1, columns, -torch.inf).logsumexp(dim=-1)
    log_p = log_p.masked_fill(columns == log_q.shape[-1], -torch.inf)
    return torch.cat([log_p, log_tail.unsqueeze(-1)], dim=-1), torch.cat(
        [padded.gather(-1, columns), rest.unsqueeze(-1)], dim=-1
    )


def _finite(log_probabilities: Tensor) -> Tensor:
    """So that nothing times the logarithm of nothing is nothing, in gradients too; what is only tiny stays as it is."""
    return torch.nan_to_num(log_probabilities, nan=torch.nan, posinf=torch.inf, neginf=LOG_ZERO)


def sum_over_chunks(
    loss: ChunkLoss, hidden: Float[Tensor, "tokens hidden"], head: Tensor, chunk_size: int
) -> tuple[Tensor, Tensor]:
    """Sum a loss over tokens whose logits never exist all at once.

    Each chunk's logits are made, differentiated and dropped in the forward pass, so that memory is
    [chunk_size, vocab] whatever the number of tokens, and nothing is computed twice.

    Args:
        loss: (logits [chunk, vocab] in hidden's dtype, which tokens) to (scalar loss sum, metric sums [metrics]).
        hidden: final hidden states of the draft, any floating dtype.
        head: [vocab, hidden], the output projection; gets a gradient if it requires one.
        chunk_size: tokens at a time.

    Returns:
        the loss summed over all tokens, fp32 scalar with gradient, and the metric sums, without. No tokens give
        zeros, with a graph that gives zero gradients.
    """
    if not torch.is_grad_enabled():
        hidden, head = hidden.detach(), head.detach()  # or a trainable head's gradient would be made for nobody
    return _SumOverChunks.apply(hidden, head, loss, chunk_size)  # type: ignore[no-any-return, no-untyped-call]


class _SumOverChunks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        hidden: Tensor,
        head: Tensor,
        loss: ChunkLoss,
        chunk_size: int,
    ) -> tuple[Tensor, Tensor]:
        wants_hidden, wants_head = ctx.needs_input_grad[:2]  # type: ignore[attr-defined]
        hidden_gradient = torch.empty_like(hidden) if wants_hidden else None
        head_gradient = torch.zeros_like(head) if wants_head else None
        losses, metrics = [], []
        weight = head.detach().requires_grad_(wants_head)
        for start in range(0, max(1, len(hidden)), chunk_size):  # one empty chunk when there are no tokens
            tokens = slice(start, min(start + chunk_size, len(hidden)))
            states = hidden[tokens].detach().requires_grad_(wants_hidden)
            with torch.enable_grad():
                chunk_loss, chunk_metrics = loss(states @ weight.to(states.dtype).T, tokens)
            losses.append(chunk_loss.detach())
            metrics.append(chunk_metrics.detach())
            inputs = [tensor for tensor in (states, weight) if tensor.requires_grad]
            gradients = list(torch.autograd.grad(chunk_loss, inputs)) if inputs else []
            if hidden_gradient is not None:
                hidden_gradient[tokens] = gradients.pop(0)
            if head_gradient is not None:
                head_gradient += gradients.pop()
        ctx.gradients = hidden_gradient, head_gradient  # type: ignore[attr-defined]
        total_metrics = torch.stack(metrics).sum(dim=0)
        ctx.mark_non_differentiable(total_metrics)
        return torch.stack(losses).sum(), total_metrics

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, loss_gradient: Tensor, _: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None]:
        hidden_gradient, head_gradient = ctx.gradients  # type: ignore[attr-defined]
        return (
            None if hidden_gradient is None else hidden_gradient * loss_gradient.to(hidden_gradient.dtype),
            None if head_gradient is None else head_gradient * loss_gradient.to(head_gradient.dtype),
            None,
            None,
        )
