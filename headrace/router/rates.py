"""How fast a replica is, learned from the requests that it served.

    service time of a request = overhead + computed prompt tokens / prefill rate

A request's service begins when it is placed, or when the one before it on the same replica begins to
answer, whichever is later. Requests with next to nothing to compute tell the overhead (a step, the wire),
the others the rate: a ratio of decayed sums, so that several prompts computed in one step, of which only
the first seems to take time, count right. One sample may not claim more than OUTLIER times the prediction.
"""

from __future__ import annotations

DEFAULT_PREFILL_RATE = 2000.0  # tokens/s, until anything is known
DEFAULT_DECODE_RATE = 20.0
DEFAULT_OVERHEAD_S = 0.01
DEFAULT_DECODE_S = 5.0
DEFAULT_OUTPUT_TOKENS = 128.0

SMALL_PROMPT = 32  # computed tokens at most that tell the overhead
MIN_PREFILL = 128  # and at least that tell the rate
MEMORY = 0.95  # what a sum keeps of its past with each sample: the last 20 samples or so count
OUTLIER = 8.0
PRIOR_SAMPLES = 2.0  # how many samples the prior weighs


class Rates:
    """What is known of one replica; read the attributes, write through the methods.

    ``prefill_rate`` tokens/s, ``decode_rate`` tokens/s of one stream, ``overhead_s``, ``decode_s`` the mean
    time a request decodes, ``output_tokens`` the mean length of an answer.
    """

    __slots__ = ("_decode_s", "_decode_tokens", "_num_decodes", "_num_overheads", "_prefill_s",
                 "_prefill_tokens", "decode_rate", "decode_s", "num_prefills", "output_tokens", "overhead_s",
                 "prefill_rate")  # fmt: skip

    def __init__(self) -> None:
        self.num_prefills = 0
        self.prefill_rate = DEFAULT_PREFILL_RATE
        self.decode_rate = DEFAULT_DECODE_RATE
        self.overhead_s = DEFAULT_OVERHEAD_S
        self.decode_s = DEFAULT_DECODE_S
        self.output_tokens = DEFAULT_OUTPUT_TOKENS
        self._num_overheads = 0
        self._num_decodes = 0
        self._prefill_tokens = self._prefill_s = 0.0
        self._decode_tokens = self._decode_s = 0.0

    def set_prior(self, mate: Rates) -> None:
        """Takes over what a replica of the same model and hardware has learned, where this one has not."""
        if not self.num_prefills and mate.num_prefills:
            self.prefill_rate = mate.prefill_rate
        if not self._num_overheads and mate._num_overheads:
            self.overhead_s = mate.overhead_s
        if not self._num_decodes and mate._num_decodes:
            self.decode_rate, self.decode_s = mate.decode_rate, mate.decode_s
            self.output_tokens = mate.output_tokens

    def on_prefill(self, num_computed_tokens: int, service_s: float, *, alone: bool) -> None:
        """A request began to answer; ``alone``: no other prompt was ahead of it."""
        predicted = self.overhead_s + num_computed_tokens / self.prefill_rate
        if self.num_prefills >= 5:
            service_s = min(service_s, OUTLIER * predicted)
        if num_computed_tokens <= SMALL_PROMPT:
            if alone:
                self._num_overheads += 1
                step = max(0.05, 1.0 / (1 + self._num_overheads))
                self.overhead_s += step * (service_s - self.overhead_s)
        elif num_computed_tokens >= MIN_PREFILL:
            # an overhead that was only guessed must not eat what it takes to compute
            net = max(service_s - self.overhead_s, 0.1 * service_s) if alone else service_s
            if not self.num_prefills:
                weight = PRIOR_SAMPLES * num_computed_tokens
                self._prefill_tokens, self._prefill_s = weight, weight / self.prefill_rate
                if self.prefill_rate == DEFAULT_PREFILL_RATE:  # a mere guess weighs little
                    self._prefill_tokens *= 0.01
                    self._prefill_s *= 0.01
            self.num_prefills += 1
            self._prefill_tokens = MEMORY * self._prefill_tokens + num_computed_tokens
            self._prefill_s = MEMORY * self._prefill_s + net
            self.prefill_rate = self._prefill_tokens / max(self._prefill_s, 1e-9)

    def on_decode(self, num_output_tokens: int, num_samples: int, decode_s: float) -> None:
        """A request ended after ``num_output_tokens`` of all its samples over ``decode_s``."""
        length = num_output_tokens / num_samples
        self._num_decodes += 1
        step = max(0.05, 1.0 / (1 + self._num_decodes))
        self.decode_s += step * (decode_s - self.decode_s)
        self.output_tokens += step * (length - self.output_tokens)
        if length > 1 and decode_s > 0:
            self._decode_tokens = MEMORY * self._decode_tokens + length - 1
            self._decode_s = MEMORY * self._decode_s + decode_s
            self.decode_rate = self._decode_tokens / self._decode_s
