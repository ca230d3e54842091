"""Where a round's time goes, through transformers' own passes and through ours: a table and a picture.

Speculative decoding of held-out prompts, batch 1, turn by turn in one process; milliseconds a round, so many drafted in
each.

    python scripts/profile_round.py --pair runs/best-service/run/pair --plot docs/round.png
"""

import argparse
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from decode.clock import ForwardClock
from decode.decoder import SpeculativeDecoder
from decode.heldout import heldout_prompts, spread
from decode.params import SamplingParams, SpeculationParams
from decode.trace import Trace

PARTS = ("target's passes", "draft's passes", "drawing what is drafted", "verification and all else")
SETTINGS = {
    "greedy": SamplingParams(temperature=0.0),
    "T=0.8, top-p 0.95": SamplingParams(temperature=0.8, top_p=0.95),
    "T=1": SamplingParams(temperature=1.0),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", required=True)
    parser.add_argument("--prompts", default="service")
    parser.add_argument("--num-prompts", type=int, default=8)
    parser.add_argument("--num-draft-tokens", type=int, default=3)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--plot", help="PNG file for the picture")
    options = parser.parse_args()
    found = profile(options)
    table = Table("ms a round", *PARTS, "whole", "outside the models")
    for name, milliseconds in found.items():
        whole = sum(milliseconds)
        cells = [f"{each:.2f}" for each in [*milliseconds, whole]]
        table.add_row(name, *cells, f"{(milliseconds[2] + milliseconds[3]) / whole:.1%}")
    Console(highlight=False, width=140).print(table)
    if options.plot:
        plot(found, Path(options.plot))


def profile(options: argparse.Namespace) -> dict[str, list[float]]:
    """Milliseconds a round of each of PARTS, by setting and kind of pass."""
    speculation = SpeculationParams(num_draft_tokens=options.num_draft_tokens, never_slower=False)
    decoders = {
        name: SpeculativeDecoder.from_pretrained(None, options.pair, speculation, tuned=tuned)
        for name, tuned in (("transformers' passes", False), ("ours", True))
    }
    clocks = {(setting, name): ForwardClock() for setting in SETTINGS for name in decoders}
    traces = {key: Trace() for key in clocks}
    prompts = spread(heldout_prompts(options.prompts), options.num_prompts + 1)
    for number, prompt in enumerate(track(prompts, "decoding")):
        for setting, params in SETTINGS.items():
            for name, decoder in decoders.items():
                (ids,) = decoder.encode_all([prompt], params)
                torch.manual_seed(number)
                clock = clocks[setting, name]
                with clock:
                    _, (trace,) = decoder.engine.generate_ids(
                        [ids], replace(params, max_new_tokens=options.max_new_tokens)
                    )
                traces[setting, name] += trace
                if number == 0:  # the first text packs weights and fills caches
                    clock.seconds_of.clear()
                    traces[setting, name] = Trace()
    return {
        f"{setting}, {name}": of_round(clocks[setting, name], traces[setting, name], decoders[name])
        for setting, name in clocks
    }


def of_round(clock: ForwardClock, trace: Trace, decoder: SpeculativeDecoder) -> list[float]:
    """Milliseconds of each of PARTS in a round."""
    assert decoder.draft is not None
    of_draft = clock.seconds_of[decoder.draft.model]
    seconds = (trace.seconds.verify, of_draft, trace.seconds.draft - of_draft, trace.seconds.rest)
    return [1000 * each / trace.num_target_passes for each in seconds]


def plot(found: dict[str, list[float]], path: Path) -> None:
    """One bar for each setting and kind of pass."""
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(10, 0.5 * len(found) + 1.2))
    starts = [0.0] * len(found)
    for place, part in enumerate(PARTS):
        widths = [milliseconds[place] for milliseconds in found.values()]
        axis.barh([*found], widths, left=starts, label=part)
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
    axis.invert_yaxis()
    axis.set_xlabel("ms a round")
    axis.legend(loc="lower right", fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
