"""What the subcommands of spec-decode are told."""

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from .params import SamplingParams, SpeculationParams

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Engine = Literal["transformers", "vllm", "sglang", "gguf"]
# sampling parameters that YAML and JSON may give as whole numbers
FRACTIONS = ("temperature", "top_p", "min_p")


@dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    """Answer prompts with a target and its draft.

    Args:
        pair: a pair's folder; or the folder or hub id of any draft, together with target; lookup alone needs none
        target: the target, a folder or a hub id; null takes the one that the pair names
        prompt: the prompt; without it and without prompts, stdin is one
        prompts: many prompts: an embedded set, a .jsonl, .json, .parquet or .txt file, a datasets folder, or - for
            stdin with one a line
        sampling: how to choose tokens
        speculation: how to draft and verify
        raw: continue the prompt as it stands, without the chat template
        stream: print the text while it is generated
        show_accepted: colour the text by where it came from: drafted and accepted, corrected, bonus
        json: print a JSON object per prompt: text, tokens and where each came from, log-probabilities, counts
        dtype: of both models; auto keeps each checkpoint's
        draft_dtype: of the draft, when it is another
        tuned: pass through models in faster ways than transformers' own where there are such
    """

    pair: str | None = None
    target: str | None = None
    prompt: str | None = None
    prompts: str | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    speculation: SpeculationParams = field(default_factory=SpeculationParams)
    raw: bool = False
    stream: bool = False
    show_accepted: bool = False
    json: bool = False
    dtype: Dtype = "auto"
    draft_dtype: Dtype | None = None
    tuned: bool = True

    def __post_init__(self) -> None:
        """Raises ValueError for what cannot be meant together."""
        if self.pair is None and self.target is None:
            raise ValueError("pair: none given; use --pair, or --target with --speculation.proposer lookup")
        if self.pair is None and self.speculation.proposer != "lookup":
            raise ValueError(
                f"pair: none given, and the proposer {self.speculation.proposer} needs one; "
                "use --pair, or --speculation.proposer lookup"
            )
        if self.prompt is not None and self.prompts is not None:
            raise ValueError("prompt: given together with prompts; give one of them")
        if self.prompt is not None and not self.prompt.strip():
            raise ValueError("prompt: is empty; give some text")
        if self.json and (self.stream or self.show_accepted):
            raise ValueError("json: is printed when a text is finished; leave stream and show_accepted out")
        if self.sampling.logprobs is not None and not self.json:
            raise ValueError("sampling.logprobs: only --json shows them")


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """Measure how often the target accepts the draft, and what that is worth on this machine.

    Args:
        pair: the pair's folder; what is measured is also written into its pair.json
        target: the target, a folder or a hub id; null takes the one that the pair names
        prompts: an embedded set (service, general), a .jsonl, .json, .parquet or .txt file, or a datasets folder; only
            its held-out prompts if it marks any
        responses: what `spec-distill respond` wrote with the same sampling, instead of generating target text; text for
            greedy decoding is taken from there too, and generated for other settings
        sampling: the sampling parameters to measure at; seed null takes 0
        more_sampling: further settings to measure, each told by what differs from sampling, such as [{temperature: 0}];
            the pair keeps what is found at the first
        num_draft_tokens: tokens proposed a round while counting; null takes 4 and gives the pair the best number
        batch_size: prompts decoded at a time
        num_decoded_prompts: prompts decoded speculatively to count acceptance; alpha is computed on all
        num_timed_prompts: prompts decoded one by one, plainly and speculatively with the best number of draft tokens,
            to measure the speedup; 0 measures none
        num_samples: of the prompts decoded speculatively, how many are kept with their texts, and with p and q of each
            token, for `spec-decode report`
        output: JSON file for all figures; until it is there, what is finished is kept beside it, and the same command
            goes on from that
        dtype: of both models; auto keeps each checkpoint's
    """

    pair: str
    target: str | None = None
    prompts: str = "service"
    responses: str | None = None
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=1.0, seed=0))
    more_sampling: list[dict[str, Any]] = field(default_factory=list)
    num_draft_tokens: int | None = None
    batch_size: int = 16
    num_decoded_prompts: int = 32
    num_timed_prompts: int = 5
    num_samples: int = 3
    output: str | None = None
    dtype: Dtype = "auto"

    def __post_init__(self) -> None:
        """Raises ValueError for a value that cannot be meant."""
        for name in ("batch_size", "num_decoded_prompts"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)} is not possible; give 1 or more")
        if self.num_timed_prompts != 0 and self.num_timed_prompts < 5:
            raise ValueError(
                f"num_timed_prompts: {self.num_timed_prompts} is too few for a median; give 5 or more, or 0 for none"
            )
        if self.num_samples < 0:
            raise ValueError(f"num_samples: {self.num_samples} is not possible; give 0 or more")
        for params in self.settings:
            if params.has_penalties:
                raise ValueError("sampling: alpha is measured without penalties, biases and bad words; leave them out")
            if params.max_new_tokens < 2:
                raise ValueError("sampling.max_new_tokens: 1 leaves nothing to draft; give 2 or more")

    @property
    def settings(self) -> list[SamplingParams]:
        """All that is measured, with a seed: noise must be the same wherever and whenever a batch is worked on."""
        settings = [self.sampling]
        for changes in self.more_sampling:
            if unknown := set(changes) - set(vars(self.sampling)):
                raise ValueError(f"more_sampling: {min(unknown)} is no sampling parameter; give such as temperature: 0")
            whole = {name: float(value) for name, value in changes.items() if name in FRACTIONS and type(value) is int}
            try:
                settings.append(replace(self.sampling, **(changes | whole)))
            except (TypeError, ValueError) as error:
                raise ValueError(f"more_sampling: {error}") from error
        return [params if params.seed is not None else replace(params, seed=0) for params in settings]


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """Time plain against speculative decoding, one prompt at a time, turn by turn in one process.

    Args:
        pair: the pair's folder; or the folder or hub id of any draft, together with target
        target: the target, a folder or a hub id; null takes the one that the pair names
        prompts: an embedded set (service, general), a .jsonl, .json, .parquet or .txt file, or a datasets folder; only
            its held-out prompts if it marks any
        responses: what `spec-distill respond` wrote: of a set that marks none, only the prompts that it held out
        num_prompts: repetitions, each on a prompt of its own
        temperatures: settings to time; 0 is greedy
        top_p: for the settings above temperature 0
        max_new_tokens: length of each text at most
        context_tokens: let other prompts of the set, answered by the target, stand before each, until it has at least
            so many tokens
        speculation: how to draft and verify
        transformers: also time transformers with the same target weights: plain, assisted by the stock draft with its
            defaults, and assisted with the fixed number of draft tokens that serves it best
        roofline: also measure how fast memory is read, and say which share of that decoding reaches
        output: JSON file for all figures
        dtype: of both models; auto keeps each checkpoint's
        tuned: pass through models in faster ways than transformers' own where there are such
    """

    pair: str
    target: str | None = None
    prompts: str = "service"
    responses: str | None = None
    num_prompts: int = 8
    temperatures: list[float] = field(default_factory=lambda: [0.0, 1.0])
    top_p: float = 1.0
    max_new_tokens: int = 128
    context_tokens: int = 0
    speculation: SpeculationParams = field(default_factory=SpeculationParams)
    transformers: bool = False
    roofline: bool = False
    output: str | None = None
    dtype: Dtype = "auto"
    tuned: bool = True

    def __post_init__(self) -> None:
        """Raises ValueError for a value that cannot be meant."""
        if self.num_prompts < 5:
            raise ValueError(f"num_prompts: {self.num_prompts} is too few for a median; give 5 or more")
        if not self.temperatures:
            raise ValueError("temperatures: is empty; give some, such as [0, 1]")
        if self.context_tokens < 0:
            raise ValueError(f"context_tokens: {self.context_tokens} is not possible; give 0 or more")


@dataclass(frozen=True, kw_only=True)
class ReportConfig:
    """Show what evaluate and bench found as one HTML page: plots, tables, and texts with p and q of each token.

    Args:
        result: what `spec-decode evaluate --output` wrote; or a pair's folder, which keeps the same but for the texts
        compare: more of these, to stand beside it, such as those of other pairs, or of this one before distillation
        bench: what `spec-decode bench --output` wrote
        output: the page to write, which is one file and needs no network
    """

    result: str | None = None
    compare: list[str] = field(default_factory=list)
    bench: str | None = None
    output: str = "report.html"

    def __post_init__(self) -> None:
        """Raises ValueError for what cannot be meant."""
        if not self.results:
            raise ValueError("result: none given; use --result FILE, or --compare FILE FILE to see several")

    @property
    def results(self) -> list[str]:
        """All to be shown, in order."""
        return ([] if self.result is None else [self.result]) + self.compare


@dataclass(frozen=True, kw_only=True)
class ProveConfig:
    """Show that a pair's text is its target's: greedy texts, sampled distribution, acceptance; exits with 1 if not.

    Args:
        pair: the pair's folder, which gets proof.json
        target: the target, a folder or a hub id; null takes the one that the pair names
        prompts: an embedded set (service, general), a .jsonl, .json, .parquet or .txt file, or a datasets folder; only
            its held-out prompts if it marks any
        num_prompts: prompts that are decoded, for each check anew
        max_new_tokens: length of each text at most
        sampling: of the checks that sample
        num_draft_tokens: tokens proposed a round; null takes the pair's
        tie_steps: two logits tie by rounding if they are no further apart than so many steps of the dtype at their size
        seed: of the checks that sample
        dtype: to serve in; auto keeps the checkpoint's. Greedy texts are compared in float32 too
    """

    pair: str
    target: str | None = None
    prompts: str = "service"
    num_prompts: int = 24
    max_new_tokens: int = 64
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=1.0))
    num_draft_tokens: int | None = None
    tie_steps: float = 2.0
    seed: int = 0
    dtype: Dtype = "auto"

    def __post_init__(self) -> None:
        """Raises ValueError for a value that cannot be meant."""
        if self.num_prompts < 1:
            raise ValueError(f"num_prompts: {self.num_prompts} is not possible; give 1 or more")
        if self.max_new_tokens < 2:
            raise ValueError(f"max_new_tokens: {self.max_new_tokens} leaves nothing to draft; give 2 or more")
        if not self.tie_steps >= 0:
            raise ValueError(f"tie_steps: {self.tie_steps} is not possible; give 0 or more")
        if self.sampling.temperature == 0:
            raise ValueError("sampling.temperature: 0 samples nothing; greedy texts are compared anyway")
        if self.sampling.has_penalties:
            raise ValueError("sampling: p and q are compared without penalties, biases and bad words; leave them out")


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """Write a pair's draft for another engine, with the command that serves it, and compare what was written.

    Args:
        pair: the pair's folder
        to: the engine: transformers, vllm, sglang, or gguf for llama.cpp
        output: the folder to write; it must not hold anything
        target: the target, a folder or a hub id; null takes the one that the pair names
        prompts: on which it is measured what the engine cannot be told: an embedded set (service, general), a .jsonl,
            .json, .parquet or .txt file, or a datasets folder; only its held-out prompts if it marks any
    """

    pair: str
    to: Engine
    output: str
    target: str | None = None
    prompts: str = "service"
