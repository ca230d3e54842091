"""The draft under its losses: what is computed for one batch."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from train.task import NonFinite, StepOutput

from .branches import choose_starts, draft_branches, predicting, with_branches
from .config import RunConfig
from .losses import acceptance, block_efficiency, forward_kl, sum_over_chunks, with_tail
from .objective import Objective
from .teacher import Batch, Head, TeacherHead, compiled, final_hidden_states, hidden_states


@dataclass(frozen=True)
class Signal:
    """What the teacher says of the tokens of a batch: its hidden states there, or its likeliest tokens.

    Attributes:
        hidden: [tokens, hidden], what enters its head; log_normalizers: fp32 [tokens], if they were kept with it.
        top_log_p, top_columns: [tokens, k], and the draft's column of each, -1 where it has none.
        log_tail: [tokens], log of the mass of all tokens beyond those.
    """

    hidden: Tensor | None = None
    log_normalizers: Tensor | None = None
    top_log_p: Tensor | None = None
    top_columns: Tensor | None = None
    log_tail: Tensor | None = None

    def at(self, tokens: slice) -> "Signal":
        """Of some of the tokens."""
        return Signal(*(None if each is None else each[tokens] for each in vars(self).values()))


@dataclass(frozen=True)
class TokenScores:
    """How the draft does at each of some tokens of text; all fp32 [tokens], on the CPU.

    Attributes:
        alpha, alpha_high: sum_v min(p, q); an interval, whose ends are equal where the teacher is known entirely.
        forward_kl: in nats.
        top1_agreement: 1 where both find the same token likeliest.
        acceptance: probability that the draft proposes the text's own token and has it accepted, given that the text
            goes on with it: min(1, q / p) of that token; at least so much where its p was not kept.
        greedy_acceptance: 1 where the draft's likeliest token is the text's own.
    """

    alpha: Tensor
    alpha_high: Tensor
    forward_kl: Tensor
    top1_agreement: Tensor
    acceptance: Tensor
    greedy_acceptance: Tensor


class DistillModule(nn.Module):
    """The draft and what it is taught, on response tokens or on branches off them.

    Args:
        draft: the model that learns, fp32.
        teacher: the target's frozen head, on the draft's output vocabulary.
        target: runs a pass per batch; None when batches bring the teacher's signal.
        config: of the run.
        stop_ids: tokens after which nothing is drafted.
        reference: a draft trained before, for selecting tokens.

    Attributes:
        branching: whether the next batches are for branches.
    """

    def __init__(
        self,
        draft: PreTrainedModel,
        teacher: TeacherHead,
        target: PreTrainedModel | None,
        config: RunConfig,
        stop_ids: frozenset[int] = frozenset(),
        reference: PreTrainedModel | None = None,
    ) -> None:
        super().__init__()
        self.draft = draft
        self.teacher = teacher
        self.draft_head = Head(draft, teacher.token_ids, "draft")
        # in a list, so that their parameters are not this module's: neither trained nor saved nor replicated
        self._frozen = [target, reference]
        self.reference_head = None if reference is None else Head(reference, teacher.token_ids, "reference")
        self.objective = Objective(config.objective)
        self.config = config
        self.branching = False
        self._loss = compiled(self._loss_of_chunk) if config.compile else self._loss_of_chunk
        width, device = len(teacher.weight), teacher.weight.device
        ids = torch.arange(width, device=device) if teacher.token_ids is None else teacher.token_ids
        # the draft's column of each of the target's tokens, -1 for none
        self.columns = torch.full((width,), -1, device=device)
        self.columns[ids] = torch.arange(len(ids), device=device)
        self.ids = ids
        self.stops = torch.isin(ids, torch.tensor(sorted(stop_ids), dtype=torch.long, device=device))

    def train(self, mode: bool = True) -> "DistillModule":
        """The draft learns as it will draft: dropout would make the loss depend on how a batch is divided."""
        super().train(mode)
        self.draft.eval()
        return self

    def forward(self, batch: Batch) -> StepOutput:
        """Loss and metrics summed over the tokens that are learnt, of `collate`'s batch or of branches off it."""
        return self._on_branches(batch) if self.branching else self._on_text(batch)

    @torch.no_grad()
    def score(self, batch: Batch) -> TokenScores:
        """How the draft does at each response token of a batch, in order."""
        signal, hidden = self._signal(batch), final_hidden_states(self.draft, batch)
        own, kept_log_p = self._own_columns(batch), batch.get("token_log_p")
        rows, parts = self._head_rows(), []
        for start in range(0, len(hidden), self.config.chunk_size):
            tokens = slice(start, start + self.config.chunk_size)
            log_q_of_all = self._log_q(hidden[tokens] @ rows.to(hidden.dtype).T)
            log_p, log_q = self._compared(signal.at(tokens), log_q_of_all)
            columns = own[tokens]
            at = columns.clamp_min(0).unsqueeze(1)
            log_p_own = self._own_log_p(signal.at(tokens), log_p, columns) if kept_log_p is None else kept_log_p[tokens]
            ratio = (log_q_of_all.gather(1, at).squeeze(1) - log_p_own).clamp_max(0).exp()
            low = acceptance(log_p, log_q) if signal.log_tail is None else acceptance(log_p[:, :-1], log_q[:, :-1])
            likeliest = log_q_of_all.argmax(dim=1)
            scores = (
                low,
                acceptance(log_p, log_q),
                forward_kl(log_p, log_q),
                (self._likeliest_column(signal, tokens, log_p) == likeliest).float(),
                torch.where(columns >= 0, ratio, 0.0),
                (columns == likeliest).float(),
            )
            parts.append(torch.stack(scores).float().cpu())
        return TokenScores(*(torch.cat(parts, dim=1) if parts else torch.zeros(6, 0)))

    def _on_text(self, batch: Batch) -> StepOutput:
        signal, hidden = self._signal(batch), final_hidden_states(self.draft, batch)
        own = self._own_columns(batch)
        weights = self._selection(batch, signal, hidden)

        def chunk_loss(logits: Tensor, tokens: slice) -> tuple[Tensor, Tensor]:
            of_chunk = None if weights is None else weights[tokens]
            return self._loss(logits, signal.at(tokens), own[tokens], of_chunk)

        loss_sum, alpha = sum_over_chunks(chunk_loss, hidden, self._head_rows(), self.config.chunk_size)
        if weight := self.config.objective.alignment_weight:
            assert signal.hidden is not None
            similarity = nn.functional.cosine_similarity(hidden.float(), signal.hidden.float(), dim=-1)
            loss_sum = loss_sum + weight * (1 - similarity).sum()
        return StepOutput(loss_sum, batch["predicts"].sum(), {"alpha": alpha})

    def _loss_of_chunk(
        self, logits: Tensor, signal: Signal, own: Tensor, weights: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        log_q_of_all = self._log_q(logits)
        log_p, log_q = self._compared(signal, log_q_of_all)
        losses = self.objective(log_p, log_q, log_q_of_all, own)
        likely = slice(None) if signal.log_tail is None else slice(-1)  # of a tail it is not known what is in it
        alpha = acceptance(log_p[:, likely], log_q.detach()[:, likely])
        return (losses if weights is None else weights * losses).sum(), alpha.sum()

    def _on_branches(self, batch: Batch) -> StepOutput:
        """Positions count by the probability that they are reached, and more where they are rejected if so wished."""
        config, target = self.config.branches, self._frozen[0]
        assert target is not None
        gamma, length = config.num_draft_tokens, batch["input_ids"].shape[1]
        starts = choose_starts(batch["predicts"], config.per_text)
        branches = draft_branches(
            batch, starts, gamma - 1, lambda texts: hidden_states(self.draft, texts), self._sample
        )
        sequences, places = with_branches(batch, branches), predicting(length, branches).flatten(1)
        with torch.no_grad():
            signal = Signal(hidden=_checked(_gathered(hidden_states(target, sequences), places)))
        hidden = _gathered(hidden_states(self.draft, sequences), places)
        # of a branch's last position, whose token nothing follows, any column does
        own = nn.functional.pad(self.columns[branches.tokens], (0, 1)).flatten()
        none = torch.full_like(own, -1)

        def chunk_loss(logits: Tensor, tokens: slice) -> tuple[Tensor, Tensor]:
            log_q_of_all = self._log_q(logits)
            log_p, log_q = self._compared(signal.at(tokens), log_q_of_all)
            at = own[tokens].unsqueeze(1)
            passing = (log_p.gather(1, at) - log_q.gather(1, at)).clamp_max(0).exp().view(-1, gamma).detach()
            going_on = passing.masked_fill(self.stops[own[tokens]].view(-1, gamma), 0.0)
            reached = nn.functional.pad(going_on[:, :-1].cumprod(dim=1), (1, 0), value=1.0)
            alphas = acceptance(log_p, log_q)
            weights = (reached * (1 + (config.rejected_weight - 1) * (1 - alphas.detach().view(-1, gamma)))).flatten()
            loss = torch.zeros((), device=logits.device)
            if set(self.objective.weights) != {"block_efficiency"}:
                loss = (weights * self.objective(log_p, log_q, log_q_of_all, none[tokens])).sum()
            if weight := self.objective.weights.get("block_efficiency"):
                # as many times as a branch has positions on average, to be of the size of the others
                counts = weights.view(-1, gamma).sum(dim=1)
                loss = loss + weight * (counts * block_efficiency(alphas.view(-1, gamma))).sum()
            return loss, torch.stack([weights.sum(), (weights * alphas.detach()).sum()])

        whole_branches = max(1, self.config.chunk_size // gamma) * gamma
        loss_sum, sums = sum_over_chunks(chunk_loss, hidden, self._head_rows(), whole_branches)
        return StepOutput(loss_sum, sums[0], {"alpha": sums[1]})

    def _signal(self, batch: Batch) -> Signal:
        """The teacher's: the kept one, or from a pass of the target."""
        if "top_ids" in batch:
            return Signal(
                top_log_p=_checked(batch["top_log_p"], may_be_infinite=True),
                top_columns=self.columns[batch["top_ids"]],
                log_tail=batch["log_tail"],
            )
        if "teacher_hidden" in batch:
            return Signal(hidden=_checked(batch["teacher_hidden"]), log_normalizers=batch["log_normalizers"])
        target = self._frozen[0]
        assert target is not None
        with torch.no_grad():
            return Signal(hidden=_checked(final_hidden_states(target, batch)))

    def _compared(self, signal: Signal, log_q: Tensor) -> tuple[Tensor, Tensor]:
        """log p, without gradient, and log q of the same columns."""
        if signal.hidden is not None:
            with torch.no_grad():
                return self.teacher.log_probabilities(signal.hidden, signal.log_normalizers), log_q
        assert signal.top_log_p is not None and signal.top_columns is not None and signal.log_tail is not None
        return with_tail(signal.top_log_p, signal.log_tail, log_q, signal.top_columns)

    def _log_q(self, logits: Tensor) -> Tensor:
        """From the draft's raw products with its head."""
        return (self.draft_head.finish(logits) / self.config.temperature).log_softmax(dim=-1)

    def _head_rows(self) -> Tensor:
        weight: Tensor = self.draft.get_output_embeddings().weight
        return weight if self.teacher.token_ids is None else weight[self.teacher.token_ids]

    def _own_columns(self, batch: Batch) -> Tensor:
        """The draft's column of the token that follows where one is predicted, int64 [tokens]."""
        following = nn.functional.pad(batch["input_ids"][:, 1:], (0, 1))
        return self.columns[following[batch["predicts"]]]

    def _own_log_p(self, signal: Signal, log_p: Tensor, columns: Tensor) -> Tensor:
        """log p of the text's own tokens [tokens]; at least that where it is none of the likeliest."""
        if signal.top_columns is None:
            return log_p.gather(1, columns.clamp_min(0).unsqueeze(1)).squeeze(1)
        assert signal.top_log_p is not None and signal.log_tail is not None
        found = signal.top_columns == columns.unsqueeze(1)
        at_most = torch.minimum(signal.top_log_p[:, -1], signal.log_tail)
        return torch.where(found.any(dim=1), signal.top_log_p.masked_fill(~found, -torch.inf).amax(dim=1), at_most)

    def _likeliest_column(self, signal: Signal, tokens: slice, log_p: Tensor) -> Tensor:
        if signal.top_columns is None:
            return log_p.argmax(dim=1)
        columns = signal.top_columns[tokens]
        known = (columns >= 0).int()  # the likeliest that the draft has; where it has none of them, no agreement
        return columns.gather(1, known.argmax(dim=1, keepdim=True)).squeeze(1)

    def _sample(self, hidden: Tensor) -> Tensor:
        q = self._log_q(hidden @ self._head_rows().to(hidden.dtype).T).exp()
        if bool(q.isnan().any()):  # multinomial would end this process alone, and say nothing of the batch
            raise NonFinite("the draft's output")
        return self.ids[q.multinomial(1).squeeze(1)]

    @torch.no_grad()
    def _selection(self, batch: Batch, signal: Signal, hidden: Tensor) -> Tensor | None:
        """Weights [tokens] of the tokens on which a trained reference is furthest ahead (Hu et al. 2025, AdaSPEC).

        None where all count alike. The weights' mean is 1, so that the learning rate means what it does without them.
        """
        fraction, reference = self.config.objective.selected_fraction, self._frozen[1]
        if fraction == 1 or reference is None:
            return None
        assert self.reference_head is not None
        weight: Tensor = reference.get_output_embeddings().weight
        rows = weight if self.teacher.token_ids is None else weight[self.teacher.token_ids]
        theirs = final_hidden_states(reference, batch)
        gaps = []
        for start in range(0, len(hidden), self.config.chunk_size):
            tokens = slice(start, start + self.config.chunk_size)
            log_q = self._log_q(hidden[tokens] @ self._head_rows().to(hidden.dtype).T)
            products = theirs[tokens] @ rows.to(theirs.dtype).T
            reference_log_q = (self.reference_head.finish(products) / self.config.temperature).log_softmax(dim=-1)
            ours = forward_kl(*self._compared(signal.at(tokens), log_q))
            gaps.append(ours - forward_kl(*self._compared(signal.at(tokens), reference_log_q)))
        gap = torch.cat(gaps) if gaps else torch.zeros(0, device=hidden.device)
        count = max(1, round(fraction * len(gap)))
        chosen = torch.zeros_like(gap)
        chosen[gap.topk(min(count, len(gap))).indices] = len(gap) / count
        return chosen


def _gathered(hidden: Tensor, places: Tensor) -> Tensor:
    """Hidden states [rows, n, hidden] at places [rows, k], as [rows * k, hidden]."""
    return hidden.gather(1, places.unsqueeze(2).expand(-1, -1, hidden.shape[-1])).flatten(0, 1)


def _checked(of_teacher: Tensor, *, may_be_infinite: bool = False) -> Tensor:
    """Raises NonFinite: there is something in it that no teacher says."""
    wrong = of_teacher.isnan() if may_be_infinite else ~of_teacher.isfinite()
    if bool(wrong.any()):
        raise NonFinite("the teacher's output")
    return of_teacher
