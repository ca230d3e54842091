"""What a draft learns: per-token losses on log-probabilities, and the chunked head that feeds them.

Pure torch, fp32 arithmetic. p is the teacher's distribution and q the draft's. With a reduced output vocabulary
the columns are the draft's ids and p is *not* renormalised over them, so that acceptance is never overstated.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

ChunkLoss = Callable[[Tensor, slice], tuple[Tensor, Tensor]]


def forward_kl(log_p: Float[Tensor, "tokens vocab"], log_q: Float[Tensor, "tokens vocab"]) -> Float[Tensor, " tokens"]:
    """KL(p | q) = sum_v p (log p - log q) per token (Hinton et al. 2015), in nats; 0 log 0 is 0."""
    p = log_p.exp()
    # a token the teacher rules out costs nothing, however sure the draft is that it is ruled out too
    cross_entropy = -(p * log_q.clamp_min(torch.finfo(log_q.dtype).min)).sum(dim=-1)
    negative_entropy: Tensor = torch.special.xlogy(p, p).sum(dim=-1)
    return negative_entropy + cross_entropy


def acceptance(log_p: Float[Tensor, "tokens vocab"], log_q: Float[Tensor, "tokens vocab"]) -> Float[Tensor, " tokens"]:
    """Probability that a token drafted from q is accepted: sum_v min(p, q) = 1 - TV (Leviathan et al. 2023, eq. 3)."""
    shared: Tensor = torch.minimum(log_p, log_q).exp().sum(dim=-1)
    return shared


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
