"""What the subcommands of spec-distill are told."""

from dataclasses import dataclass, field
from typing import Literal, get_args

from decode.params import AdapterKind, DraftKind, SamplingParams
from train.config import DataLimits, TrainConfig

LossName = Literal["forward_kl", "reverse_kl", "jsd", "tv", "nla", "lk", "cross_entropy", "block_efficiency"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
SignalKind = Literal["top_k", "hidden_states"]


@dataclass(frozen=True, kw_only=True)
class RespondConfig:
    """Let the target answer the prompts: the text that the draft will learn from, and be judged on.

    Args:
        target: the model to draft for, a folder or a hub id
        prompts: service or general (embedded sets), a .jsonl, .json, .parquet or .txt file, a datasets folder, or - for
            stdin
        output: folder for the responses; holds train/, heldout/ and heldout_greedy/, each a datasets folder
        sampling: how the target samples; the temperature you will serve with
        samples_per_prompt: responses to each training prompt
        batch_size: prompts decoded at a time
        heldout_fraction: share of the prompts held out when the prompt set does not say which
        keep_states: also keep what entered the target's head before each token, so that training needs no pass of the
            target and the responses no `spec-distill cache`; on disk and, for the batch at hand, in memory, 2 bytes a
            token and unit of width in bf16
        dtype: of the target; auto keeps the checkpoint's
    """

    target: str
    prompts: str
    output: str
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=1.0, seed=0))
    samples_per_prompt: int = 1
    batch_size: int = 128
    heldout_fraction: float = 0.1
    keep_states: bool = False
    dtype: Dtype = "auto"

    def __post_init__(self) -> None:
        """Raises ValueError for a value that cannot be meant."""
        for name in ("samples_per_prompt", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)} is not possible; give 1 or more")
        if self.sampling.seed is None:
            raise ValueError("sampling.seed: null cannot be resumed; give a number")
        if not 0 < self.heldout_fraction < 1:
            raise ValueError(f"heldout_fraction: {self.heldout_fraction} is not possible; give a share such as 0.1")


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """Keep what the teacher says of the responses on disk, so that training needs no pass of the target.

    Args:
        responses: what `spec-distill respond` wrote
        output: folder for the same responses with the signal beside each; `spec-distill run` takes it as responses
        target: the teacher, where it is not the model that wrote the responses; its tokenizer must be the same
        kind: top_k keeps the likeliest tokens and the mass of all others, for one temperature; hidden_states keeps what
            entered the head, from which training recovers whole distributions at any temperature
        top_k: tokens kept at each position, where kind is top_k; what the others hold is learnt as one sum, in which a
            draft with a reduced vocabulary cannot tell what it may not say, so that hidden states teach it better
        temperature: of the distributions, where kind is top_k; the temperature you will serve with
        dtype: of the target; auto keeps the checkpoint's
        chunk_size: tokens whose logits exist at a time
        tokens_per_pass: tokens in one pass of the target, prompts and padding included
        compile: let torch.compile fuse the target's pass: faster after a wait, with a C++ compiler
    """

    responses: str
    output: str
    target: str | None = None
    kind: SignalKind = "top_k"
    top_k: int = 64
    temperature: float = 1.0
    dtype: Dtype = "auto"
    chunk_size: int = 1024
    tokens_per_pass: int = 8192
    compile: bool = False

    def __post_init__(self) -> None:
        """Raises ValueError for a value that cannot be meant."""
        for name in ("top_k", "chunk_size", "tokens_per_pass"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)} is not possible; give 1 or more")
        if not self.temperature > 0:
            raise ValueError(f"temperature: {self.temperature} is not possible; give a number above 0")


@dataclass(frozen=True, kw_only=True)
class FreshConfig:
    """The size of a draft of the target's class with random weights; the rest of its shape follows from the target's.

    Args:
        num_layers: its depth
        hidden_size: its width, a multiple of the target's head_dim; of the target's own it has its embeddings
            and head, with another they are random too: train them with train_embeddings true
        intermediate_size: of its feed-forward layers; null scales the target's with the width
        seed: of the random weights
    """

    num_layers: int
    hidden_size: int
    intermediate_size: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        """Raises ValueError for a value that cannot be meant."""
        for name in ("num_layers", "hidden_size", "intermediate_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"fresh.{name}: {value} is not possible; give 1 or more")


SELF_DRAFT_OPTIONS = ("skipped_attention", "skipped_mlp", "exit_layer", "adapter", "low_rank_share", "bits")


@dataclass(frozen=True, kw_only=True)
class BuildConfig:
    """Make a draft: out of layers of the target, of another model, with random weights; or let the target draft itself.

    Args:
        target: the model to draft for, a folder or a hub id
        output: folder of the new pair
        kind: model makes a draft of its own; the others draft with the target's weights and cache: skip without some of
            its sublayers, exit with its first layers, low_rank with products of two small matrices instead of its large
            ones, quantised with copies of its matrices in fewer bits
        skipped_attention: layers whose attention is skipped; null for both searches on responses what to skip
        skipped_mlp: layers whose MLP is skipped
        exit_layer: layers to draft with, where kind is exit; null chooses the number on responses
        adapter: what follows the first layers, where kind is exit, for `spec-distill run` to train: a layer of its own
            (layer), or one without attention (mlp); both begin as the target's last
        low_rank_share: weights of the small matrices over those of the large ones, where kind is low_rank; null is 0.5
        bits: of the matrices, 8 or 4; for quantised, where null is 8, and beside skipping or an exit
        layers: which layers of the target to keep, in order, from 0; or how many; null is 4 without draft and fresh
        choose: where layers says how many, those evenly spaced from first to last (even), or those left after dropping
            again and again the one whose absence leaves acceptance on the responses highest (greedy)
        calibration_tokens: response tokens on which greedy measures acceptance
        draft: an existing model with the target's tokenizer, a folder or a hub id, instead of layers
        fresh: a new model of the target's class, instead of layers
        vocab_size: size of the draft's output vocabulary, chosen by probability mass on the responses; null keeps all
        vocab_coverage: instead of a size, the share of probability mass to hold, with as few tokens as do, such as 0.98
        responses: what `spec-distill respond` wrote; needed for choose greedy, vocab_size and vocab_coverage, and to
            choose what to skip or where to exit
        num_draft_tokens: tokens to draft a round unless the caller says otherwise; null is 3, or what is found to be
            best for a target that drafts for itself
    """

    target: str
    output: str
    kind: DraftKind = "model"
    skipped_attention: list[int] | None = None
    skipped_mlp: list[int] | None = None
    exit_layer: int | None = None
    adapter: AdapterKind | None = None
    low_rank_share: float | None = None
    bits: Literal[8, 4] | None = None
    layers: int | list[int] | None = None
    choose: Literal["even", "greedy"] = "even"
    calibration_tokens: int = 1000
    draft: str | None = None
    fresh: FreshConfig | None = None
    vocab_size: int | None = None
    vocab_coverage: float | None = None
    responses: str | None = None
    num_draft_tokens: int | None = None

    def __post_init__(self) -> None:
        """Raises ValueError for a value that cannot be meant."""
        made_of = [name for name in ("layers", "draft", "fresh") if getattr(self, name) is not None]
        if len(made_of) > 1:
            raise ValueError(f"{made_of[1]}: a draft is made of one thing, and {made_of[0]} is given; leave out one")
        given = {name for name in SELF_DRAFT_OPTIONS if getattr(self, name) is not None}
        if self.kind == "model" and given:
            raise ValueError(f"{min(given)}: is for a target that drafts for itself; give kind too")
        if self.kind != "model" and made_of:
            raise ValueError(f"{made_of[0]}: is for a draft of its own; leave it out, or give kind model")
        if self.kind == "quantised" and given - {"bits"}:
            raise ValueError(
                f"{min(given - {'bits'})}: with kind quantised nothing is left out; give kind skip or exit"
            )
        if self.kind == "low_rank" and given - {"low_rank_share"}:
            raise ValueError(f"{min(given - {'low_rank_share'})}: goes with no kind low_rank; leave it out")
        if self.kind != "low_rank" and self.low_rank_share is not None:
            raise ValueError("low_rank_share: is for kind low_rank; leave it out")
        if self.kind != "model" and self.choose == "greedy":
            raise ValueError("choose: greedy chooses layers for a draft of its own; leave it out, or give kind model")
        if self.low_rank_share is not None and not 0 < self.low_rank_share < 1:
            raise ValueError(f"low_rank_share: {self.low_rank_share} is not possible; give a share such as 0.5")
        if self.kind == "exit" and given & {"skipped_attention", "skipped_mlp"}:
            raise ValueError("skipped_attention: with kind exit whole layers are left out; give kind skip")
        if self.kind == "skip" and given & {"exit_layer", "adapter"}:
            raise ValueError(f"{max(given & {'exit_layer', 'adapter'})}: is for kind exit; leave it out")
        if self.adapter is not None and self.bits is not None:
            raise ValueError("bits: an adapter follows layers as they are; leave out one of the two")
        if self.choose == "greedy" and (isinstance(self.layers, list) or self.draft or self.fresh):
            raise ValueError("choose: greedy finds out which layers to keep; give layers as a number and nothing else")
        if self.vocab_size is not None and self.vocab_coverage is not None:
            raise ValueError("vocab_coverage: says how large the vocabulary is, as vocab_size does; leave out one")
        for wish, is_wished in {
            "a reduced vocab_size is chosen": self.vocab_size is not None,
            "vocab_coverage is measured": self.vocab_coverage is not None,
            "choose greedy measures acceptance": self.choose == "greedy",
            "what to skip is chosen": self.kind == "skip" and not given & {"skipped_attention", "skipped_mlp"},
            "kind low_rank finds out what its matrices are for": self.kind == "low_rank",
            "where to exit is chosen": self.kind == "exit" and self.exit_layer is None,
        }.items():
            if is_wished and self.responses is None:
                raise ValueError(f"responses: {wish} on responses; name their folder")
        if self.vocab_size is not None and self.vocab_size < 1:
            raise ValueError(f"vocab_size: {self.vocab_size} is not possible; give 1 or more, or null")
        if self.vocab_coverage is not None and not 0 < self.vocab_coverage <= 1:
            raise ValueError(f"vocab_coverage: {self.vocab_coverage} is not possible; give a share such as 0.98")
        for name in ("calibration_tokens", "num_draft_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}: {value} is not possible; give 1 or more")


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A part of a training run with losses of its own.

    Args:
        losses: weight of each: forward_kl, reverse_kl, jsd, tv, nla (-log alpha), lk, cross_entropy (with the text);
            on branches block_efficiency too
        share: of all steps that it lasts; null for the last stage, which takes what is left
        plateau_evals: end it sooner, after so many evaluations in a row without a new lowest held-out forward KL
    """

    losses: dict[LossName, float]
    share: float | None = None
    plateau_evals: int | None = None

    def __post_init__(self) -> None:
        """Raises ValueError for a value that cannot be meant."""
        if not self.losses or not all(weight > 0 for weight in self.losses.values()):
            raise ValueError(f"losses: {self.losses} is not possible; give at least one loss a weight above 0")
        if strange := sorted(set(self.losses) - set(get_args(LossName))):
            raise ValueError(f"losses: there is no {strange[0]!r}; choose from {', '.join(get_args(LossName))}")
        if self.share is not None and not 0 < self.share <= 1:
            raise ValueError(f"share: {self.share} is not possible; give a share of all steps such as 0.5, or null")
        if self.plateau_evals is not None and self.plateau_evals < 1:
            raise ValueError(f"plateau_evals: {self.plateau_evals} is not possible; give 1 or more, or null")


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """What the draft learns by.

    Args:
        stages: one after the other, each with its losses; none is what accepted most in docs/ablation.md: forward_kl
            for 60% of the steps, then tv
        jsd_beta: of the Jensen-Shannon divergence; near 0 it goes as forward KL, near 1 as reverse KL
        lk_eta: how fast LK turns from KL to TV as acceptance grows
        selected_fraction: learn from this share of tokens only, those that a reference draft is furthest ahead on;
            chosen among the tokens that pass through the model at once
        reference: that draft, a pair trained before; needed for a selected_fraction below 1
        alignment_weight: weight of 1 - cos(draft's, teacher's final hidden state) beside the losses
    """

    stages: tuple[Stage, ...] = ()
    jsd_beta: float = 0.5
    lk_eta: float = 3.0
    selected_fraction: float = 1.0
    reference: str | None = None
    alignment_weight: float = 0.0

    def __post_init__(self) -> None:
        """Raises ValueError for a value that cannot be meant."""
        if any(stage.share is None and stage.plateau_evals is None for stage in self.stages[:-1]):
            raise ValueError("stages: only the last may lack both share and plateau_evals; say when the others end")
        shares = [stage.share for stage in self.stages[:-1] if stage.share is not None and stage.plateau_evals is None]
        if self.stages and len(shares) == len(self.stages) - 1 and sum(shares) >= 1:
            raise ValueError(
                f"stages: the shares before the last one are {sum(shares):g} in all, so that it never begins; give less"
            )
        if not 0 < self.jsd_beta < 1:
            raise ValueError(f"jsd_beta: {self.jsd_beta} is not possible; give a number between 0 and 1")
        if not self.lk_eta >= 0:
            raise ValueError(f"lk_eta: {self.lk_eta} is not possible; give 0 or more")
        if not 0 < self.selected_fraction <= 1:
            raise ValueError(f"selected_fraction: {self.selected_fraction} is not possible; give a share up to 1")
        if self.selected_fraction < 1 and self.reference is None:
            raise ValueError("reference: selected_fraction compares with a draft trained before; name its pair")
        if not self.alignment_weight >= 0:
            raise ValueError(f"alignment_weight: {self.alignment_weight} is not possible; give 0 or more")

    @property
    def stages_or_default(self) -> tuple[Stage, ...]:
        return self.stages or (Stage(losses={"forward_kl": 1.0}, share=0.6), Stage(losses={"tv": 1.0}))


@dataclass(frozen=True, kw_only=True)
class BranchesConfig:
    """On-policy steps: the draft continues the target's text, and the teacher scores what it drafts.

    Args:
        share: of steps that learn from branches instead of the text; 0 for none
        num_draft_tokens: tokens of a branch
        per_text: branches off each text
        rejected_weight: weight of a position in the measure that its drafted token is rejected; 1 favours none
    """

    share: float = 0.0
    num_draft_tokens: int = 3
    per_text: int = 16
    rejected_weight: float = 1.0

    def __post_init__(self) -> None:
        """Raises ValueError for a value that cannot be meant."""
        if not 0 <= self.share <= 1:
            raise ValueError(f"branches.share: {self.share} is not possible; give a share of steps from 0 to 1")
        for name in ("num_draft_tokens", "per_text"):
            if getattr(self, name) < 1:
                raise ValueError(f"branches.{name}: {getattr(self, name)} is not possible; give 1 or more")
        if not self.rejected_weight > 0:
            raise ValueError(f"branches.rejected_weight: {self.rejected_weight} is not possible; give more than 0")


# metrics of which more is better
SELECTABLE = (
    *("alpha", "block_efficiency", "predicted_speedup", "top1_agreement"),
    *("greedy_alpha", "greedy_block_efficiency", "greedy_predicted_speedup"),
)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Distil: train a pair's draft on the target's token distributions.

    Args:
        pair: the pair to start from, as `spec-distill build` wrote it
        responses: what `spec-distill respond` wrote, or `spec-distill cache` with the teacher's signal; or other data,
            such as a .jsonl, .parquet or .txt file, a folder of datasets, or a hub id
        target: the target, if it is not where the pair says
        temperature: of the teacher's and the draft's distributions; the temperature you will serve with
        teacher: a pass of the target at each step (online), or the signal kept beside the responses (cached), which
            needs no more of the target than its head; but measure_speed and parity_prompts decode with all of it,
            before and after the training
        objective: what the draft learns by
        branches: whether it also learns from what it drafts itself
        max_length: tokens after which a row of other data is cut
        heldout_fraction: share of other data that is held out
        data_limits: how bad the texts may be before they are refused
        train_embeddings: also train embeddings and head; else they stay as they are
        packing_length: tokens of sequences that texts are packed into, without seeing each other; null pads instead
        chunk_size: tokens whose logits exist at a time
        compile: let torch.compile fuse the models' passes and the loss: faster steps after a wait, with a C++ compiler
        measure_speed: measure costs here before training, so that evaluations can predict a speedup
        parity_prompts: held-out prompts that the finished pair decodes, to prove that it accepts what was predicted
        train: how to train; its output will hold pair/
    """

    pair: str
    responses: str
    target: str | None = None
    temperature: float = 1.0
    teacher: Literal["online", "cached"] = "online"
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    branches: BranchesConfig = field(default_factory=BranchesConfig)
    max_length: int = 1024
    heldout_fraction: float = 0.05
    data_limits: DataLimits = field(default_factory=DataLimits)
    train_embeddings: bool = False
    packing_length: int | None = None
    chunk_size: int = 1024
    compile: bool = False
    measure_speed: bool = True
    parity_prompts: int = 40
    train: TrainConfig

    def __post_init__(self) -> None:
        """Raises ValueError for a value that cannot be meant."""
        if not self.temperature > 0:
            raise ValueError(f"temperature: {self.temperature} is not possible; give a number above 0")
        if self.chunk_size < 1:
            raise ValueError(f"chunk_size: {self.chunk_size} is not possible; give 1 or more")
        if self.max_length < 2:
            raise ValueError(f"max_length: {self.max_length} leaves nothing to predict; give 2 or more")
        if not 0 < self.heldout_fraction <= 0.5:
            raise ValueError(f"heldout_fraction: {self.heldout_fraction} is not possible; give a share such as 0.05")
        if self.packing_length is not None and self.packing_length < 2:
            raise ValueError(f"packing_length: {self.packing_length} is not possible; give 2 or more, or null")
        if self.parity_prompts < 0:
            raise ValueError(f"parity_prompts: {self.parity_prompts} is not possible; give 0 or more")
        if self.branches.share and self.teacher == "cached":
            raise ValueError("branches.share: no signal is kept for what the draft will say; use teacher online")
        only_branches = [
            stage for stage in self.objective.stages_or_default if set(stage.losses) == {"block_efficiency"}
        ]
        if only_branches and self.branches.share < 1:
            raise ValueError("losses: block_efficiency is of branches; set branches.share to 1, or add another loss")
        if self.branches.share and self.packing_length:
            raise ValueError("packing_length: branches need texts of their own; use null")
        if (name := self.train.select_by) and name not in SELECTABLE:
            raise ValueError(f"train.select_by: {name!r} cannot be selected by; choose from {', '.join(SELECTABLE)}")
        if name and name.endswith("predicted_speedup") and not self.measure_speed:
            raise ValueError(f"train.select_by: {name} needs costs; set measure_speed to true")
        for stage in self.objective.stages_or_default:
            if stage.plateau_evals and not self.train.eval_every_steps:
                raise ValueError("plateau_evals: nothing is evaluated on the way; give train.eval_every_steps too")
            if self.branches.share and set(stage.losses) == {"cross_entropy"}:
                raise ValueError("losses: cross_entropy is of text, and branches have none; add another loss")
