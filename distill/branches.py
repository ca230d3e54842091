"""On-policy branches: the draft continues the target's text for a few tokens, which is all a draft ever conditions on.

Branches are drafted off many places of a text at once. They follow the text in one sequence, under a mask that lets
each see the text up to its start and itself, so that a model scores them all in one pass.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .teacher import Batch, hidden_states

# Tokens of the text and of each branch that find out whether a model keeps them apart.
PROBE_LENGTH = 8


class Branches(NamedTuple):
    """Branches off the texts of a batch.

    Attributes:
        starts: int64 [rows, branches], the text position after which each begins.
        tokens: int64 [rows, branches, drafted], what was drafted.
    """

    starts: Tensor
    tokens: Tensor


def choose_starts(predicts: Tensor, num_branches: int) -> Tensor:
    """Positions to branch off, drawn evenly, with replacement, from those whose next token belongs to a response.

    Args:
        predicts: bool [rows, length], at least one true in each row.
        num_branches: per row.

    Returns:
        int64 [rows, branches], ascending.
    """
    return predicts.float().multinomial(num_branches, replacement=True).sort(dim=1).values


def with_branches(batch: Batch, branches: Branches) -> Batch:
    """The texts with their branches behind them, for one pass of a model.

    Args:
        batch: input_ids [rows, length].
        branches: may have drafted nothing so far.

    Returns:
        input_ids, position_ids [rows, length + branches * drafted] and attention_mask bool [rows, 1, n, n].
    """
    input_ids = batch["input_ids"]
    rows, length = input_ids.shape
    num_branches, num_drafted = branches.tokens.shape[1:]
    device = input_ids.device
    steps = torch.arange(1, num_drafted + 1, device=device)
    text = torch.arange(length, device=device)
    positions = (branches.starts.unsqueeze(2) + steps).flatten(1)
    # which branch each position is of, -1 for the text; and until where in the text it sees
    branch = torch.arange(num_branches, device=device).repeat_interleave(num_drafted).expand(rows, -1)
    branch = torch.cat([torch.full_like(input_ids, -1), branch], dim=1)
    sees_until = torch.cat([text.expand(rows, -1), branches.starts.repeat_interleave(num_drafted, dim=1)], dim=1)
    places = torch.cat([text.expand(rows, -1), positions], dim=1)
    of_text = text <= sees_until.unsqueeze(2)
    same = (branch[:, :, None] == branch[:, None, length:]) & (places[:, None, length:] <= places[:, :, None])
    mask = torch.cat([of_text, same], dim=2)
    return {
        "input_ids": torch.cat([input_ids, branches.tokens.flatten(1)], dim=1),
        "position_ids": places,
        "attention_mask": mask.unsqueeze(1),
    }


def predicting(length: int, branches: Branches) -> Tensor:
    """Where each drafted position is predicted from in the sequence that `with_branches` made of texts of `length`.

    Returns:
        int64 [rows, branches, drafted + 1]: the start, then each drafted token.
    """
    rows, num_branches, num_drafted = branches.tokens.shape
    behind = length + torch.arange(num_branches * num_drafted, device=branches.starts.device)
    behind = behind.view(1, num_branches, num_drafted).expand(rows, -1, -1)
    return torch.cat([branches.starts.unsqueeze(2), behind], dim=2)


@torch.no_grad()
def draft_branches(
    batch: Batch,
    starts: Tensor,
    num_drafted: int,
    hidden_states: Callable[[Batch], Tensor],
    sample: Callable[[Tensor], Tensor],
) -> Branches:
    """Let a draft continue the texts.

    Args:
        batch: input_ids [rows, length].
        starts: int64 [rows, branches].
        num_drafted: tokens per branch.
        hidden_states: the draft's, [rows, n, hidden], for what `with_branches` returns.
        sample: tokens int64 [k] drawn from the draft, for its hidden states [k, hidden].
    """
    rows, length = batch["input_ids"].shape
    branches = Branches(starts, starts.new_zeros(*starts.shape, 0))
    for _ in range(num_drafted):
        hidden = hidden_states(with_branches(batch, branches))
        last = predicting(length, branches)[..., -1]
        found = hidden.gather(1, last.unsqueeze(2).expand(-1, -1, hidden.shape[-1]))
        drawn = sample(found.flatten(0, 1)).view(rows, -1, 1)
        branches = Branches(starts, torch.cat([branches.tokens, drawn], dim=2))
    return branches


@torch.no_grad()
def refuse_unbranchable(model: PreTrainedModel, role: str) -> None:
    """One pass over a text and two branches off it: a branch must be read as if it stood alone behind the text.

    Args:
        model: in eval mode.
        role: what to call it in messages.

    Raises:
        ValueError: it is not, as with a short sliding window.
    """
    generator = torch.Generator().manual_seed(0)
    vocab_size = model.config.get_text_config().vocab_size
    text, first, second = torch.randint(vocab_size, (3, 1, PROBE_LENGTH), generator=generator).to(model.device)
    start = PROBE_LENGTH // 2
    batch = {"input_ids": text}
    branches = Branches(torch.full_like(text[:, :2], start), torch.stack([first, second], dim=1))
    together = hidden_states(model, with_branches(batch, branches))[:, -PROBE_LENGTH:].float()
    ids = torch.cat([text[:, : start + 1], second], dim=1)
    alone = hidden_states(model, {"input_ids": ids})[:, -PROBE_LENGTH:].float()
    if not (together - alone).abs().max() <= torch.finfo(model.dtype).eps ** 0.5 * alone.abs().max():
        raise ValueError(
            f"branches.share: the {role}, of model type {model.config.model_type!r}, reads branches otherwise than "
            "single texts; use 0"
        )
