"""`spec-decode generate`: prompts in, text out."""

import json
import logging
import sys
from collections.abc import Iterable
from dataclasses import replace
from time import perf_counter
from typing import Any

from rich.console import Console
from rich.text import Text

from .config import GenerateConfig
from .decoder import Chat, Generation, Piece, SpeculativeDecoder
from .params import SamplingParams
from .prompts import Prompt, as_messages, load_prompts, read_stdin
from .trace import Trace

logger = logging.getLogger(__name__)

STYLES = {"accepted": "green", "corrected": "red", "bonus": "cyan", "plain": "default"}


def generate(config: GenerateConfig) -> None:
    """Print an answer to each prompt on stdout, and what it took on stderr.

    Raises:
        ValueError: a pair, model or prompt that is missing or does not fit.
    """
    prompts = _prompts(config)
    decoder = SpeculativeDecoder.from_pretrained(
        config.target,
        config.pair,
        config.speculation,
        dtype=config.dtype,
        draft_dtype=config.draft_dtype,
        tuned=config.tuned,
    )
    # refuse at once what would end the run half-way
    decoder.engine.begin(decoder.encode_all(prompts, config.sampling, config.raw), config.sampling)
    console = _Console(highlight=False, soft_wrap=True)
    if config.show_accepted:
        legend = Text("drafted and accepted", STYLES["accepted"]) + Text(", ") + Text("corrected", STYLES["corrected"])
        console.print(legend + Text(", ") + Text("bonus", STYLES["bonus"]) + Text("\n"))
    for number, prompt in enumerate(prompts):
        if len(prompts) > 1 and not config.json:
            console.print(Text(("\n" if number else "") + f"# {prompt.id}", "bold"))
        # another seed each, so that prompts do not share their luck
        seed = config.sampling.seed
        params = config.sampling if seed is None else replace(config.sampling, seed=seed + number)
        content = prompt.raw if config.raw else prompt.messages
        if config.json:
            print(json.dumps({"id": prompt.id, **_figures(decoder.generate([content], params, raw=config.raw)[0])}))
        else:
            _answer(decoder, content, params, config, console)


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Whoever read our output has seen enough: `run` knows what to do, rich would exit with 1."""
        raise BrokenPipeError


def _answer(
    decoder: SpeculativeDecoder, content: Chat, params: SamplingParams, config: GenerateConfig, console: Console
) -> None:
    trace, started = Trace(), perf_counter()
    pieces: Iterable[Piece] = decoder.stream(content, params, trace, raw=config.raw)
    for piece in pieces if config.stream else list(pieces):
        if config.show_accepted:
            console.print(Text(piece.text, STYLES[piece.provenance]), end="")
        else:  # exactly the text: rich would replace tabs and drop control characters
            print(piece.text, end="", flush=True)
    console.print()
    seconds = perf_counter() - started
    logger.info(
        "%d tokens in %.1f s (%.1f tokens/s), %.2f per target pass; %d of %d drafted tokens accepted",
        trace.num_committed,
        seconds,
        trace.num_committed / seconds,
        trace.block_efficiency,
        trace.num_accepted,
        trace.num_drafted,
    )
    if trace.num_paused:
        logger.info("%d tokens were decoded plainly: speculation was slower", trace.num_paused)
    if (lossy := config.speculation.lossy) and params.temperature:
        logger.info("lossy (%s): the text does not follow the target's distribution", lossy)


def _figures(answer: Generation) -> dict[str, Any]:
    """All that is known of an answer, as JSON values; pairs instead of an object where keys are token ids."""
    return {
        **vars(answer),
        "logprobs": [{"chosen": each.chosen, "top": list(each.top.items())} for each in answer.logprobs],
        "trace": answer.trace.figures(),
    }


def _prompts(config: GenerateConfig) -> list[Prompt]:
    if config.prompts is not None:
        return load_prompts(config.prompts)
    text = config.prompt
    if text is None:
        if sys.stdin.isatty():
            raise ValueError("prompt: none given; use --prompt, --prompts, or write one to stdin")
        text = read_stdin().strip()
        if not text:
            raise ValueError("prompt: stdin is empty; write a prompt to it, or use --prompt")
    return [Prompt("1", as_messages(text))]
