"""What the training loop is given: a module, its data, how it is judged and what it leaves."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import broadcast
from torch import nn
from transformers import AutoModelForCausalLM
from transformers import PreTrainedTokenizerBase as Tokenizer

from decode.costs import Costs
from decode.pair import Pair, load_draft_vocab, load_tensors, save_draft_vocab, save_tensors

from .config import RunConfig
from .judge import judge
from .module import DistillModule, TokenScores
from .objective import Stages
from .teacher import Batch
from .texts import Rows, Texts, column

Collate = Callable[[list[dict[str, Any]], int | None], Batch]


class DistillTask:
    """What `train.loop.fit` trains: a `DistillModule` on responses, judged on held-out responses.

    Args:
        module: what learns.
        collate: rows to a batch, packed into sequences of so many tokens, or padded (None).
        texts: of which the held-out ones are judged by.
        config: of the run.
        costs: measured here; None predicts no speedup.
        tokenizer: goes into the pair.
        pair: what the trained pair will say of itself.
        own: of a target that drafts for itself, what is trained, by the names that it has in a pair.
        inputs: what tells others of the same name, by field of the config; a resumed run must find the same.
        dtype: of what is saved.

    Attributes:
        state: what must survive an interruption.
    """

    def __init__(
        self,
        module: DistillModule,
        collate: Collate,
        texts: Texts,
        config: RunConfig,
        costs: Costs | None,
        tokenizer: Tokenizer,
        pair: Pair,
        own: dict[str, nn.Parameter] | None = None,
        inputs: dict[str, str] | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.module = module
        self._collate = collate
        self.texts = texts
        self.config = config
        self.costs = costs
        self.tokenizer = tokenizer
        self.pair = pair
        self.own = own or {}
        self.inputs = inputs or {}
        self.dtype = dtype
        self.state: dict[str, Any] = {"inputs": dict(self.inputs)}
        self.stages = Stages(config.objective.stages_or_default, self.state)

    def collate(self, rows: list[dict[str, Any]]) -> Batch:
        """Rows to the tensors of one micro-batch."""
        return self._collate(rows, self.config.packing_length)

    def begin_step(self, step: int, num_steps: int) -> None:
        """Choose the losses, and between text and branches: the same on every process and after every resume."""
        for what, was in self.state.get("inputs", {}).items():
            if self.inputs.get(what, was) != was:
                name, output = getattr(self.config, what), self.config.train.output
                raise ValueError(
                    f"{what}: {name} is not what it was when {output} was begun; restore it or give another output"
                )
        self.module.objective.weights = self.stages.at(step, num_steps).losses
        drawn = np.random.default_rng((self.config.train.seed, step)).random()
        self.module.branching = bool(drawn < self.config.branches.share)

    def evaluate(self, module: nn.Module) -> dict[str, float]:
        """Figures on held-out text.

        alpha, forward_kl and top1_agreement are means over response tokens; alpha_high is there too where the
        teacher's signal leaves alpha an interval. What `judge` adds is of sampling, and of greedy decoding with the
        prefix greedy_. top1_agreement looks at the draft's output vocabulary alone.
        """
        scores = self.scores(self.texts.heldout)
        every = {name: torch.cat([getattr(each, name) for each in scores]) for name in TokenScores.__annotations__}
        names = ["alpha", "forward_kl", "top1_agreement"]
        if not torch.equal(every["alpha"], every["alpha_high"]):
            names.append("alpha_high")
        figures = {name: float(every[name].mean()) for name in names}
        num_draft_tokens = self.pair.num_draft_tokens
        figures |= judge([each.acceptance.double().numpy() for each in scores], num_draft_tokens, self.costs)
        if self.texts.heldout_greedy is not None:
            greedy = [each.greedy_acceptance.double().numpy() for each in self.scores(self.texts.heldout_greedy)]
            of_greedy = judge(greedy, num_draft_tokens, self.costs)
            figures |= {f"greedy_{name}": value for name, value in of_greedy.items()}
            figures["greedy_alpha"] = float(np.concatenate(greedy).mean())
        # rounding differs from one kind of processor to another, and all must end a stage at one step
        loss = torch.tensor(figures["forward_kl"], dtype=torch.float32, device=self.module.draft.device)
        self.stages.evaluated(float(broadcast(loss)))
        return figures

    def scores(self, rows: Rows) -> list[TokenScores]:
        """How the draft does at the response tokens of each row."""
        size = self.config.train.micro_batch_size
        order = np.argsort([len(ids) for ids in column(rows, "input_ids")], kind="stable")
        device = self.module.draft.device
        found: dict[int, TokenScores] = {}
        for start in range(0, len(order), size):
            places = order[start : start + size].tolist()
            batch = self._collate([rows[place] for place in places], None)
            counts = batch["predicts"].sum(dim=1).tolist()
            scores = self.module.score({name: tensor.to(device) for name, tensor in batch.items()})
            split = [torch.split(getattr(scores, name), counts) for name in TokenScores.__annotations__]
            found |= {place: TokenScores(*parts) for place, parts in zip(places, zip(*split, strict=True), strict=True)}
        return [found[place] for place in range(len(order))]

    def save(self, module: nn.Module, folder: Path) -> None:
        """Write the pair."""
        if self.own:
            folder.mkdir(parents=True)
            save_tensors(folder, {name: weight.detach().to(self.dtype) for name, weight in self.own.items()})
        else:
            draft = copy.deepcopy(self.module.draft)
            nn.Module.to(draft, self.dtype)
            draft.save_pretrained(folder / "draft")
            saved = AutoModelForCausalLM.from_pretrained(folder / "draft", dtype=self.dtype).state_dict()
            for name, weight in draft.state_dict().items():
                if not torch.equal(saved[name], weight.to(saved[name].device)):
                    raise ValueError(
                        f"{folder}: {name} is not what was trained when it is read back; save it elsewhere"
                    )
            self.tokenizer.save_pretrained(folder / "draft")
        if (token_ids := load_draft_vocab(Path(self.config.pair))) is not None:
            save_draft_vocab(folder, token_ids)
        self.pair.save(folder)

    @torch.no_grad()
    def load_saved(self, folder: Path) -> None:
        """Go on with the draft as it was rounded when it was saved."""
        if self.own:
            tensors = load_tensors(folder)
            for name, weight in self.own.items():
                weight.copy_(tensors[name])
        else:
            draft = AutoModelForCausalLM.from_pretrained(folder / "draft", dtype=torch.float32)
            self.module.draft.load_state_dict(draft.state_dict())
