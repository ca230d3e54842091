"""Which losses are learnt from, when, and on which tokens."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from .config import LossName, ObjectiveConfig, Stage
from .losses import cross_entropy, forward_kl, jsd, lk, negative_log_acceptance, reverse_kl, total_variation


class Objective:
    """A weighted sum of losses per token, stage by stage.

    Attributes:
        weights: of each loss in the stage at hand.
    """

    def __init__(self, config: ObjectiveConfig) -> None:
        self.config = config
        self.weights: Mapping[LossName, float] = config.stages_or_default[0].losses

    def __call__(self, log_p: Tensor, log_q: Tensor, log_q_of_all: Tensor, columns: Tensor) -> Tensor:
        """The loss of each token.

        Args:
            log_p, log_q: [tokens, columns], the teacher's and the draft's log-probabilities of the same tokens.
            log_q_of_all: [tokens, draft_vocab].
            columns: int64 [tokens], the text's own token among draft_vocab, -1 where it has none.
        """
        losses: dict[LossName, Callable[[], Tensor]] = {
            "forward_kl": lambda: forward_kl(log_p, log_q),
            "reverse_kl": lambda: reverse_kl(log_p, log_q),
            "jsd": lambda: jsd(log_p, log_q, self.config.jsd_beta),
            "tv": lambda: total_variation(log_p, log_q),
            "nla": lambda: negative_log_acceptance(log_p, log_q),
            "lk": lambda: lk(log_p, log_q, self.config.lk_eta),
            "cross_entropy": lambda: cross_entropy(log_q_of_all, columns),
        }
        terms = [weight * losses[name]() for name, weight in self.weights.items() if name in losses]
        return torch.stack(terms).sum(dim=0) if len(terms) > 1 else terms[0]


class Stages:
    """Which stage a step belongs to.

    A stage lasts its share of all steps, or ends sooner where the held-out loss has come to a plateau; the last one
    lasts until the end.

    Args:
        stages: at least one.
        state: where it is kept how far they have come; JSON values, which survive an interruption.
    """

    def __init__(self, stages: tuple[Stage, ...], state: dict[str, Any]) -> None:
        self.stages = stages
        self.state = state
        state.update({"stage": 0, "stage_began": 0, "stage_best": None, "stage_evals_without_best": 0})

    def at(self, step: int, num_steps: int) -> Stage:
        """The stage of a step; the steps must come in order."""
        state = self.state
        stage: Stage = self.stages[state["stage"]]
        over = stage.share is not None and step - state["stage_began"] >= stage.share * num_steps
        plateau = stage.plateau_evals and state["stage_evals_without_best"] >= stage.plateau_evals
        if (over or plateau) and state["stage"] + 1 < len(self.stages):
            state.update({"stage": state["stage"] + 1, "stage_began": step})
            state.update({"stage_best": None, "stage_evals_without_best": 0})
            stage = self.stages[state["stage"]]
        return stage

    def evaluated(self, loss: float) -> None:
        """Take note of the held-out loss."""
        state = self.state
        if state["stage_best"] is None or loss < state["stage_best"]:
            state.update({"stage_best": loss, "stage_evals_without_best": 0})
        else:
            state["stage_evals_without_best"] += 1
