"""One prompt being continued: its tokens, their text, and where it ends."""

from collections.abc import Iterator
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase as Tokenizer

from .params import FinishReason, Provenance, SamplingParams

# a character has at most four bytes: text that is still incomplete after so many tokens will stay so
MAX_BYTES, MAX_INCOMPLETE_TOKENS = 4, 16


@dataclass(frozen=True)
class Logprobs:
    """Natural logarithms of the model's own probabilities: of the token chosen, and of the most probable ones."""

    chosen: float
    top: dict[int, float]


class Completion:
    """A prompt and what it was continued with.

    Args:
        prompt: token ids, at least one.
        params: what was asked for.
        model_stop_ids: tokens that end a text, beside those of params.
        tokenizer: needed for stop strings, bad words and pieces; without one, only ids are kept.

    Attributes:
        ids: the new tokens, with the stop token, or the token that completed a stop string, as the last.
        provenance: where each of them came from.
        pieces: the text that each of them added: complete characters, nothing of a stop string; text: all of it.
        logprobs: of each of them, when asked for.
        finish_reason: "stop" for a stop token or stop string, "length" for max_new_tokens; None while unfinished.
        stop_reason: the stop token's id, or the stop string.

    Raises:
        ValueError: params need a tokenizer and there is none.
    """

    def __init__(
        self,
        prompt: list[int],
        params: SamplingParams,
        model_stop_ids: frozenset[int] = frozenset(),
        tokenizer: Tokenizer | None = None,
    ) -> None:
        if tokenizer is None and (params.stop or params.bad_words):
            raise ValueError("stop, bad_words: need a tokenizer; decode with one, or use stop_token_ids and logit_bias")
        self.prompt, self.params = prompt, params
        self.sequence = list(prompt)
        self.stop_ids = model_stop_ids | set(params.stop_token_ids)
        self.stop_strings = tuple(params.stop)
        self.bad_words: list[tuple[int, ...]] = []
        self.detokenizer = Detokenizer(tokenizer) if tokenizer else None
        if tokenizer:
            # the text leaves special tokens out, so they can only be told by their ids
            special = _special_tokens(tokenizer)
            self.stop_ids |= {special[word] for word in params.stop if word in special}
            self.stop_strings = tuple(word for word in params.stop if word not in special)
            for stop in self.stop_strings:
                if inside := [word for word in special if word in stop]:
                    raise ValueError(f"stop is {stop!r}: {inside[0]} is no text; give it as a stop string of its own")
            # a text whose end is forbidden would have none
            ends = {(token,) for token in self.stop_ids}
            self.bad_words = [ids for ids in _token_sequences(tokenizer, tuple(params.bad_words)) if ids not in ends]
        self.ids: list[int] = []
        self.provenance: list[Provenance] = []
        self._pieces: list[str] = []
        self._text = ""
        self.logprobs: list[Logprobs] = []
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None

    @property
    def num_remaining(self) -> int:
        return self.params.max_new_tokens - len(self.ids)

    def extend(self, tokens: list[int], provenance: list[Provenance]) -> int:
        """Append tokens up to the end of the text, wherever in the block it falls; return how many were kept."""
        for kept, (token, origin) in enumerate(zip(tokens, provenance, strict=True), start=1):
            self.ids.append(token)
            self.sequence.append(token)
            self.provenance.append(origin)
            if self.stop_strings:
                self._detokenize()
            if self.finish_reason is None and token in self.stop_ids and len(self.ids) > self.params.min_new_tokens:
                self.finish_reason, self.stop_reason = "stop", token
            if self.finish_reason is None and self.num_remaining == 0:
                self.finish_reason = "length"
            if self.finish_reason:
                if self.stop_strings:
                    self._detokenize()
                return kept
        return len(tokens)

    @property
    def pieces(self) -> list[str]:
        self._detokenize()
        return self._pieces

    @property
    def text(self) -> str:
        if self.detokenizer and not self._pieces and not self.stop_strings:
            return self.detokenizer.decode(self.ids)  # all at once, where nobody wanted pieces
        self._detokenize()
        return self._text

    @property
    def num_certain_pieces(self) -> int:
        """How many pieces can be shown: those that cannot turn out to be the beginning of a stop string."""
        pieces = self.pieces
        if self.finish_reason or not self.stop_strings:
            return len(pieces)
        held = max(_length_of_beginning(self._text, stop) for stop in self.stop_strings)
        num_pieces = len(pieces)
        while held > 0:
            num_pieces -= 1
            held -= len(pieces[num_pieces])
        return num_pieces

    def _detokenize(self) -> None:
        """Give each token that has none its piece of text: when somebody asks for it, or a stop string may be in it."""
        if self.detokenizer is None:
            return
        for token in self.ids[len(self._pieces) :]:
            self._add_text(self.detokenizer.push(token))
        if self.finish_reason and not isinstance(self.stop_reason, str):
            self._add_text(self.detokenizer.flush(), to_last_piece=True)
            self.detokenizer = None

    def _add_text(self, piece: str, to_last_piece: bool = False) -> None:
        if to_last_piece:
            self._pieces[-1] += piece
        else:
            self._pieces.append(piece)
        self._text += piece
        if len(self.ids) <= self.params.min_new_tokens:
            return
        # a stop string that ends in this piece; of several, the one that begins first
        found = []
        for stop in self.stop_strings:
            start = self._text.find(stop, max(len(self._text) - len(piece) - len(stop) + 1, 0))
            if start >= 0:
                found.append((start, stop))
        if found:
            start, self.stop_reason = min(found)
            self.finish_reason = "stop"
            self._cut_text(start)

    def _cut_text(self, length: int) -> None:
        excess = len(self._text) - length
        self._text = self._text[:length]
        for place in reversed(range(len(self._pieces))):
            piece = self._pieces[place]
            self._pieces[place] = piece[: max(len(piece) - excess, 0)]
            excess -= len(piece) - len(self._pieces[place])


class Detokenizer:
    """Turns a stream of ids into text that concatenates to the decoded whole, at a constant cost per token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.special = frozenset(_special_tokens(tokenizer).values())
        # tokens whose text is known and which the next ones may lean on, and those whose text is incomplete
        self.known: list[int] = []
        self.pending: list[int] = []
        self.shown = ""

    def push(self, token: int) -> str:
        """The text that this token makes certain; empty while a character is incomplete."""
        if token in self.special:
            return ""
        self.pending.append(token)
        text = self._decoded()
        if text.endswith("\ufffd"):
            if len(self.pending) < MAX_INCOMPLETE_TOKENS:
                return ""
            # no character is that long; but the last tokens may begin one
            return self._settle(len(self.pending) - MAX_BYTES + 1)
        return self._settle(len(self.pending), text)

    def _settle(self, count: int, text: str | None = None) -> str:
        """Make the text of the first pending tokens certain, and return what it adds."""
        settled, pending = self.pending[:count], self.pending[count:]
        text = self.decode(self.known + settled) if text is None else text
        new = text[len(self.shown) :]
        if text:  # a first token that is only a space may leave none to lean on
            self.known, self.pending, self.shown = self.known + settled, pending, text
            if len(self.known) > 2 * MAX_INCOMPLETE_TOKENS:
                self.known = self.known[-MAX_INCOMPLETE_TOKENS:]
                self.shown = self.decode(self.known)
        return new

    def flush(self) -> str:
        """What is left at the end, incomplete characters included."""
        text = self._decoded()
        new, self.shown = text[len(self.shown) :], text
        return new

    def _decoded(self) -> str:
        return self.decode(self.known + self.pending)

    def decode(self, ids: list[int]) -> str:
        """The text of tokens that nothing precedes, special ones left out."""
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        assert isinstance(text, str)
        return text


def _length_of_beginning(text: str, stop: str) -> int:
    """Length of the longest end of the text that is a proper beginning of the stop string."""
    longest = min(len(stop) - 1, len(text))
    return next((length for length in range(longest, 0, -1) if text.endswith(stop[:length])), 0)


def _special_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """Ids of the tokens that decoding leaves out, those without a role such as eos included."""
    return {str(token): number for number, token in tokenizer.added_tokens_decoder.items() if token.special}


def _token_sequences(tokenizer: Tokenizer, words: tuple[str, ...]) -> Iterator[tuple[int, ...]]:
    """The tokens of each word, alone and after a space."""
    for word in words:
        spellings = {tuple(tokenizer.encode(text, add_special_tokens=False)) for text in (word, " " + word.lstrip())}
        yield from sorted(spelling for spelling in spellings if spelling)
