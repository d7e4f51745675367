"""The requests of a run: one kind of workload for random prompts, for a file of prompts and for a trace."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ksana.bench.arrivals import send_offsets
from ksana.bench.options import ArrivalOptions, LengthRange, WorkloadOptions
from ksana.errors import UsageError

TokenIds = list[int]
Messages = list[dict[str, Any]]
Prompt = str | TokenIds | Messages

# Short, frequent words, each a single token to most tokenizers: for APIs that take no token ids.
_COMMON_WORDS = (
    "the of and to in is that for it as was with be by on not he his but at are this have from or had an they which "
    "one you were all her she there would their we him been has when who will no more if out so up said what its "
    "about than into them can only other time new some could these two may first then do any like my now over such "
    "our man me even most made after also did many off before must well back through years where much your way down "
    "should because long each just state people those too how little good world make very year still see work life "
    "men day get here old"
)
_WORDS = _COMMON_WORDS.split()


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request to send.

    Attributes:
        prompt: text, token ids or chat messages.
        max_tokens: most tokens to generate.
        offset_s: seconds after the start of the run at which it leaves.
    """

    prompt: Prompt
    max_tokens: int
    offset_s: float = 0.0


class Workload(ABC):
    """Makes the requests of every run. The same options make the same requests on every machine."""

    ignores_eos: bool
    """Whether answers should by default run to their full length."""

    has_own_arrivals = False
    """Whether the requests say themselves when they leave."""

    @abstractmethod
    def requests(self, run: int, arrival: ArrivalOptions) -> Iterator[BenchRequest]:
        """The requests of run ``run``, counted from 0, in the order in which they leave.

        One at a time: those of a long trace would take gigabytes.
        """

    def describe(self) -> dict[str, Any]:
        """What the report says about this workload."""
        return {"kind": type(self).__name__}


class RandomWorkload(Workload):
    """Prompts of random tokens. Every run draws others, apart from the shared prefixes, so none finds itself cached."""

    ignores_eos = True

    def __init__(self, options: WorkloadOptions, *, as_text: bool) -> None:
        if options.shared_prefix_len > options.input_len.low:
            raise UsageError(
                f"--shared-prefix-len {options.shared_prefix_len} is longer than the shortest prompt of "
                f"{options.input_len.low} tokens; the prefix is a part of --input-len"
            )
        if options.max_model_len is not None:
            _check_fit(options.input_len.high, options.output_len.high, options.max_model_len)
        self._options = options
        self._as_text = as_text

    def requests(self, run: int, arrival: ArrivalOptions) -> Iterator[BenchRequest]:
        options = self._options
        count = 64 if options.num_requests is None else options.num_requests
        generator = np.random.default_rng([options.seed, run])
        input_lens = _draw_lengths(generator, options.input_len, count)
        output_lens = _draw_lengths(generator, options.output_len, count)
        prefixes = self._prefixes()
        for index, offset_s in enumerate(send_offsets(count, arrival, seed=options.seed + run)):
            own = int(input_lens[index]) - options.shared_prefix_len
            ids = prefixes[index % len(prefixes)] + random_ids(generator, options.token_range, own)
            prompt = words_of(ids) if self._as_text else ids
            yield BenchRequest(prompt, int(output_lens[index]), offset_s)

    def describe(self) -> dict[str, Any]:
        options = self._options
        return {
            "kind": "random",
            "prompts": "words" if self._as_text else "token ids",
            "input_len": [options.input_len.low, options.input_len.high],
            "output_len": [options.output_len.low, options.output_len.high],
            "shared_prefix_len": options.shared_prefix_len,
            "num_prefixes": options.num_prefixes,
            "seed": options.seed,
        }

    def _prefixes(self) -> list[TokenIds]:
        options = self._options
        seed = options.seed if options.prefix_seed is None else options.prefix_seed
        length = options.shared_prefix_len
        # A third number sets this stream of random numbers apart from the runs'.
        return [
            random_ids(np.random.default_rng([seed, number, 1]), options.token_range, length)
            for number in range(options.num_prefixes)
        ]


class ListWorkload(Workload):
    """Given prompts, in their order or shuffled; from the start again where more are wanted than there are."""

    ignores_eos = False

    def __init__(
        self, prompts: Sequence[tuple[Prompt, int | None]], options: WorkloadOptions, *, source: str = "a list"
    ) -> None:
        """Take ``prompts``, each with the most tokens to generate or None for the options' ``output_len``."""
        self._prompts = prompts
        self._options = options
        self._source = source

    def requests(self, run: int, arrival: ArrivalOptions) -> Iterator[BenchRequest]:
        options = self._options
        count = len(self._prompts) if options.num_requests is None else options.num_requests
        generator = np.random.default_rng(options.seed)
        order = generator.permutation(len(self._prompts)) if options.shuffle else np.arange(len(self._prompts))
        output_lens = _draw_lengths(generator, options.output_len, count)
        for index, offset_s in enumerate(send_offsets(count, arrival, seed=options.seed + run)):
            prompt, max_tokens = self._prompts[order[index % len(order)]]
            yield BenchRequest(prompt, max_tokens or int(output_lens[index]), offset_s)

    def describe(self) -> dict[str, Any]:
        return {"kind": "file", "file": self._source, "prompts": len(self._prompts)}


def random_ids(generator: np.random.Generator, token_range: tuple[int, int], count: int) -> TokenIds:
    """Draw ``count`` token ids."""
    ids: TokenIds = generator.integers(*token_range, count).tolist()
    return ids


def words_of(ids: TokenIds) -> str:
    """A word for each id, the same for the same id, so that equal prefixes stay equal."""
    return " ".join(_WORDS[token_id % len(_WORDS)] for token_id in ids)


def _draw_lengths(generator: np.random.Generator, lengths: LengthRange, count: int) -> npt.NDArray[np.int64]:
    return generator.integers(lengths.low, lengths.high + 1, count)


def _check_fit(input_len: int, output_len: int, max_model_len: int) -> None:
    if input_len + output_len > max_model_len:
        raise UsageError(
            f"prompts of {input_len} and answers of {output_len} tokens do not fit the model's {max_model_len}; "
            "lower --input-len or --output-len"
        )
