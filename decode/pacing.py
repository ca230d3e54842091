"""How many tokens to draft next: as many as pay, by what rounds have taken and given so far; none where none pay."""

import logging
from collections import defaultdict, deque
from collections.abc import Sequence
from statistics import fmean, median_low

from .params import SpeculationParams
from .trace import Round, Seconds

logger = logging.getLogger(__name__)

RECENT = 15  # measurements that a median is taken of
ENOUGH = 3  # measurements of one kind of pass that an odd one among them cannot spoil
DECAY = 0.98  # of acceptance counts, a round
PRIOR_WEIGHT = 3.0  # rounds' worth of what is believed before anything was seen
PRIOR_BETA = 0.6
PLAIN_ROUNDS_FIRST, PLAIN_ROUND_EVERY = 2, 64  # for the cost of plain decoding
ROUNDS_BEFORE_PAUSE, ROUNDS_OF_PROBE, ROUNDS_REMEMBERED = 6, 4, 32
DOUBTS = 1.5  # standard errors below plain decoding's speed that end the patience with rounds
PAUSE, LONGEST_PAUSE = 32, 512


class Costs:
    """Seconds of recent rounds. Of few measurements, medians take the lower: the first of a kind is often slow."""

    def __init__(self) -> None:
        self.plain: deque[float] = deque(maxlen=RECENT)
        self.draft_step: deque[float] = deque(maxlen=RECENT)
        self.rest: deque[float] = deque(maxlen=RECENT)
        self.passes: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=RECENT))

    def add(self, num_drafted: int, seconds: Seconds) -> None:
        self.passes[num_drafted + 1].append(seconds.verify)
        if num_drafted:
            self.draft_step.append(seconds.draft / num_drafted)
            self.rest.append(seconds.rest)
        else:
            self.plain.append(seconds.total)

    def rounds(self, most: int) -> list[float]:
        """Expected seconds of rounds that draft 1, 2, … tokens.

        A pass over more tokens than were measured enough is taken to cost what the next shorter one does: such optimism
        tries a pass that might pay, and so finds the steps that a line between two others would hide.
        """
        enough = min(ENOUGH, max(map(len, self.passes.values())))
        known = {size: median_low(seconds) for size, seconds in self.passes.items() if len(seconds) >= enough}
        step, rest = median_low(self.draft_step), median_low(self.rest)
        target_pass, rounds = known[min(known)], []
        for num_drafted in range(most + 1):
            target_pass = known.get(num_drafted + 1, target_pass)
            rounds.append(num_drafted * step + target_pass + rest)
        return rounds[1:]


class Regime:
    """Batches that cost about the same: what their rounds take, and whether drafting pays in them."""

    def __init__(self) -> None:
        self.costs = Costs()
        # tokens per second to be expected of rounds that draft 1, 2, … tokens; empty before the first one
        self.rates: list[float] = []
        # of recent rounds, what plain decoding would have taken over what they took
        self.gains: deque[float] = deque(maxlen=ROUNDS_REMEMBERED)
        self.num_rounds_since_plain = 0
        self.num_paused_rounds_left = 0
        self.pause = PAUSE
        self.probing = False

    @property
    def wants_plain(self) -> bool:
        """Whether the cost of plain decoding is due to be measured."""
        return len(self.costs.plain) < PLAIN_ROUNDS_FIRST or self.num_rounds_since_plain >= PLAIN_ROUND_EVERY

    def passed_plainly(self) -> None:
        self.num_rounds_since_plain = 0
        if self.num_paused_rounds_left:
            self.num_paused_rounds_left -= 1
            self.probing = True

    def drafted(self, tokens_per_row: float, seconds: float, expected_rate: float) -> None:
        """Pause when rounds gain less than plain passes: for long, or beyond doubt and as is to be expected.

        Args:
            tokens_per_row: committed in this round, a mean over rows.
            seconds: that such rounds take.
            expected_rate: tokens per second and row, by the acceptance and costs of many rounds.
        """
        self.num_rounds_since_plain += 1
        if not self.costs.plain:
            return
        plain = median_low(self.costs.plain)
        self.gains.append(tokens_per_row * plain / seconds)
        count, gain = len(self.gains), fmean(self.gains)
        if count < (ROUNDS_OF_PROBE if self.probing else ROUNDS_BEFORE_PAUSE):
            return
        doubt = (fmean((each - gain) ** 2 for each in self.gains) / (count - 1)) ** 0.5
        if (gain + DOUBTS * doubt < 1 and expected_rate * plain < 1) or (gain < 1 and count == ROUNDS_REMEMBERED):
            logger.info(
                "speculation gives %.2f of plain decoding's speed here: %d tokens without it, then a new try",
                gain,
                self.pause,
            )
            self.num_paused_rounds_left, self.pause = self.pause, min(2 * self.pause, LONGEST_PAUSE)
            self.gains.clear()
        elif self.probing and count >= ROUNDS_BEFORE_PAUSE:
            self.probing, self.pause = False, PAUSE


class Pacer:
    """Decides how many tokens each round drafts; lives as long as the engine, so that texts learn from earlier ones.

    Fixed where num_draft_tokens says so. Otherwise the number gamma of largest E / (gamma c + v(gamma + 1)), from
    the acceptance of recent rounds and their seconds. Either way, with never_slower, drafting pauses while rounds
    are measured to take longer per token than plain decoding.

    Args:
        speculation: what was asked for.
        betas: acceptance at each position of a round, as far as it is known beforehand.
        first_num_draft_tokens: before any cost is known.

    Attributes:
        paused: whether the latest round was told to draft nothing because drafting does not pay.
    """

    def __init__(
        self, speculation: SpeculationParams, betas: Sequence[float] = (), first_num_draft_tokens: int = 3
    ) -> None:
        self.speculation = speculation
        self.first_num_draft_tokens = first_num_draft_tokens
        self.prior_betas = list(betas)
        self.regimes: defaultdict[int, Regime] = defaultdict(Regime)
        self.reached: list[float] = []
        self.accepted: list[float] = []
        self.paused = False

    def num_draft_tokens(self, num_rows: int, most: int) -> int:
        """For the next round of so many rows, at most `most`; 0 is a plain pass."""
        fixed, never_slower = self.speculation.num_draft_tokens, self.speculation.never_slower
        regime = self.regimes[_size(num_rows)]
        self.paused = never_slower and regime.num_paused_rounds_left > 0
        if self.paused or most == 0:
            return 0
        if regime.wants_plain and (fixed is None or never_slower):
            return 0
        if fixed is not None:
            return min(fixed, most)
        if not regime.rates:
            return min(self.first_num_draft_tokens, self.speculation.max_draft_tokens, most)
        return min(regime.rates.index(max(regime.rates)) + 1, most)

    def observe(self, num_rows: int, num_drafted: int, rounds: list[Round], seconds: Seconds) -> None:
        """Learn from a round: what each row drafted, accepted and committed, and the seconds all of it took."""
        regime = self.regimes[_size(num_rows)]
        regime.costs.add(num_drafted, seconds)
        if num_drafted == 0:
            regime.passed_plainly()
            return
        self._count_acceptance(num_drafted, rounds)
        fixed = self.speculation.num_draft_tokens
        usual = regime.costs.rounds(max(num_drafted, fixed or self.speculation.max_draft_tokens))
        regime.rates = rates = self._rates(usual)
        expected = max(rates) if fixed is None else rates[fixed - 1]
        # a median of rounds like this one: a slow moment of the machine is not the draft's fault
        usual_seconds = usual[num_drafted - 1]
        regime.drafted(fmean(each.num_committed for each in rounds), usual_seconds, expected)

    def betas(self, num_positions: int) -> list[float]:
        """Estimated acceptance at each position, given that it is reached."""
        betas: list[float] = []
        for position in range(num_positions):
            prior = betas[-1] if betas else PRIOR_BETA
            if position < len(self.prior_betas):
                prior = self.prior_betas[position]
            reached, accepted = 0.0, 0.0
            if position < len(self.reached):
                reached, accepted = self.reached[position], self.accepted[position]
            betas.append((accepted + PRIOR_WEIGHT * prior) / (reached + PRIOR_WEIGHT))
        return betas

    def _rates(self, rounds: list[float]) -> list[float]:
        """Expected tokens per second and row of rounds that draft 1, 2, … tokens and take so many seconds."""
        reached, tokens, rates = 1.0, 1.0, []
        for beta, seconds in zip(self.betas(len(rounds)), rounds, strict=True):
            reached *= beta
            tokens += reached
            rates.append(tokens / seconds)
        return rates

    def _count_acceptance(self, num_drafted: int, rounds: list[Round]) -> None:
        missing = num_drafted - len(self.reached)
        self.reached = [DECAY * count for count in self.reached] + [0.0] * missing
        self.accepted = [DECAY * count for count in self.accepted] + [0.0] * missing
        for each in rounds:
            for position in range(each.num_verified):
                self.reached[position] += 1 / len(rounds)
                self.accepted[position] += (position < each.num_accepted) / len(rounds)


def _size(num_rows: int) -> int:
    """Batches that cost about the same."""
    return num_rows.bit_length()
