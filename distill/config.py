"""What the subcommands of spec-distill are told."""

from dataclasses import dataclass, field
from typing import Literal

from decode.params import SamplingParams
from train.config import TrainConfig

Dtype = Literal["auto", "float32", "bfloat16", "float16"]


@dataclass(frozen=True, kw_only=True)
class RespondConfig:
    """Let the target answer the prompts: the text that the draft will learn from, and be judged on.

    Args:
        target: the model to draft for, a folder or a hub id
        prompts: service or general (embedded sets), a .jsonl or .txt file, or - for stdin
        output: folder for the responses; holds train/ and heldout/, each a datasets folder
        sampling: how the target samples; the temperature you will serve with
        samples_per_prompt: responses to each training prompt
        batch_size: prompts decoded at a time
        keep_hidden_states: also keep what entered the target's head, so that training needs no teacher pass
        heldout_fraction: share of the prompts held out when the prompt set does not say which
        dtype: of the target; auto keeps the checkpoint's
    """

    target: str
    prompts: str
    output: str
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=1.0, seed=0))
    samples_per_prompt: int = 1
    batch_size: int = 64
    keep_hidden_states: bool = False
    heldout_fraction: float = 0.1
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
class BuildConfig:
    """Make a draft out of layers of the target.

    Args:
        target: the model to draft for, a folder or a hub id
        output: folder of the new pair
        layers: which layers of the target to keep, in order, from 0; or how many, evenly spaced from first to last
        vocab_size: size of the draft's output vocabulary, chosen by probability mass on the responses; null keeps all
        responses: what `spec-distill respond` wrote; needed for vocab_size
        num_draft_tokens: tokens to draft a round unless the caller says otherwise
    """

    target: str
    output: str
    layers: int | list[int] = 4
    vocab_size: int | None = None
    responses: str | None = None
    num_draft_tokens: int = 3

    def __post_init__(self) -> None:
        """Raises ValueError for a value that cannot be meant."""
        if self.vocab_size is not None and self.responses is None:
            raise ValueError("responses: a reduced vocab_size is chosen on responses; name their folder")
        if self.vocab_size is not None and self.vocab_size < 1:
            raise ValueError(f"vocab_size: {self.vocab_size} is not possible; give 1 or more, or null")
        if self.num_draft_tokens < 1:
            raise ValueError(f"num_draft_tokens: {self.num_draft_tokens} is not possible; give 1 or more")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Distil: train a pair's draft on the target's token distributions.

    Args:
        pair: the pair to start from, as `spec-distill build` wrote it
        responses: what `spec-distill respond` wrote
        target: the target, if it is not where the pair says
        temperature: of the teacher's and the draft's distributions; the temperature you will serve with
        teacher: a pass of the target at each step (online), or the hidden_states kept with the responses
        alignment_weight: weight of 1 - cos(draft's, teacher's final hidden state) beside the forward KL
        train_embeddings: also train embeddings and head; else they stay the target's
        chunk_size: tokens whose logits exist at a time
        train: how to train; its output will hold pair/
    """

    pair: str
    responses: str
    target: str | None = None
    temperature: float = 1.0
    teacher: Literal["online", "hidden_states"] = "online"
    alignment_weight: float = 0.0
    train_embeddings: bool = False
    chunk_size: int = 1024
    train: TrainConfig

    def __post_init__(self) -> None:
        """Raises ValueError for a value that cannot be meant."""
        if not self.temperature > 0:
            raise ValueError(f"temperature: {self.temperature} is not possible; give a number above 0")
        if self.chunk_size < 1:
            raise ValueError(f"chunk_size: {self.chunk_size} is not possible; give 1 or more")
        if self.alignment_weight < 0:
            raise ValueError(f"alignment_weight: {self.alignment_weight} is not possible; give 0 or more")
