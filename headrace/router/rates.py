"""How fast a replica is, learned from the requests that it served.

    service time of a request = overhead + factor · (a · u + b · u · (n − u/2))

n prompt tokens, u of them computed: the first term is a step and the wire, the second the matrices, the third
attention. Each computed token looks at all before it, which is most of the time of a prompt of 100,000
tokens and next to none of a short one's. a and b belong to a model on a class of hardware and are learned
from all replicas of that class together, or the noise of each would decide who gets which requests;
``factor`` is how much slower or faster one of them is.

A request's service begins when it is placed, or when the one before it on the same replica begins to answer,
whichever is later. Requests with next to nothing to compute tell the overhead, the others the rest: a
and b by least squares of relative errors over samples that fade. Of several prompts that one step
computes, only the first seems to take time: they are one sample. No sample may claim more than OUTLIER
times the prediction.
"""

from __future__ import annotations

DEFAULT_PREFILL_RATE = 2000.0  # tokens/s, until anything is known
DEFAULT_DECODE_RATE = 20.0
DEFAULT_OVERHEAD_S = 0.01
DEFAULT_DECODE_S = 5.0
DEFAULT_OUTPUT_TOKENS = 128.0

SMALL_PROMPT = 32  # computed tokens at most that tell the overhead
MIN_PREFILL = 128  # and at least that tell a and b
TOGETHER = 0.1  # share of the predicted time below which a prompt was computed with the one before
MEMORY = 0.98  # what a sum keeps of its past with each sample: the last 50 or so count
CLASS_MEMORY = 0.995
OUTLIER = 8.0
MIN_SPREAD = 0.02  # below it the prompts are too much alike to tell a from b
FACTOR_PRIOR = 10.0  # samples that the assumption weighs that a replica is as fast as its class


class ClassRates:
    """One model on one class of hardware. ``token_s`` is a and ``pair_s`` b, in seconds."""

    __slots__ = ("_uu", "_uy", "_uz", "_zy", "_zz", "num_samples", "pair_s", "token_s")

    def __init__(self) -> None:
        self.num_samples = 0
        self.token_s = 1.0 / DEFAULT_PREFILL_RATE
        self.pair_s = 0.0
        # sums of u², u·z, z², u·y, z·y where z are pairs and y seconds, each over the predicted time squared
        self._uu = self._uz = self._zz = self._uy = self._zy = 0.0

    @property
    def rate(self) -> float:
        """Tokens a second over the samples as they were: ``token_s`` alone can be next to nothing, where the
        time is all attention's or was all ascribed to it."""
        return self._uu / self._uy if self._uy else 1.0 / self.token_s

    def learn(self, tokens: float, pairs: float, seconds: float) -> None:
        """One sample: so many computed tokens and pairs took so long, as on a replica of factor 1."""
        self.num_samples += 1
        # over the prediction, as over what was measured the fast ones of equal prompts would weigh most
        scale = self.token_s * tokens + self.pair_s * pairs if self.num_samples > 5 else seconds
        weight = 1.0 / scale**2
        self._uu = uu = CLASS_MEMORY * self._uu + weight * tokens * tokens
        self._uz = uz = CLASS_MEMORY * self._uz + weight * tokens * pairs
        self._zz = zz = CLASS_MEMORY * self._zz + weight * pairs * pairs
        self._uy = uy = CLASS_MEMORY * self._uy + weight * tokens * seconds
        self._zy = zy = CLASS_MEMORY * self._zy + weight * pairs * seconds
        determinant = uu * zz - uz * uz
        if determinant > MIN_SPREAD * uu * zz:
            token_s = (uy * zz - zy * uz) / determinant
            pair_s = (zy * uu - uy * uz) / determinant
            if token_s > 0.0 and pair_s >= 0.0:
                self.token_s, self.pair_s = token_s, pair_s
                return
        # prompts alike, or attention lost in the noise: the best factor for both as they are
        token_s, pair_s = self.token_s, self.pair_s
        factor = (token_s * uy + pair_s * zy) / (
            token_s * token_s * uu + 2.0 * token_s * pair_s * uz + pair_s * pair_s * zz
        )
        self.token_s *= factor
        self.pair_s *= factor


class Rates:
    """One replica, of a class that may be shared; read the attributes, write through the methods.

    ``prefill_rate`` and ``decode_rate`` (of one stream) are recent tokens/s, ``decode_s`` the mean time a
    request decodes, ``output_tokens`` the mean length of an answer.
    """

    __slots__ = ("_computed", "_count", "_decode_s", "_decode_tokens", "_expected_s", "_num_decodes",
                 "_num_overheads", "_pending", "_seconds", "decode_rate", "decode_s", "factor", "group",
                 "num_prefills", "output_tokens", "overhead_s")  # fmt: skip

    def __init__(self, group: ClassRates) -> None:
        self.group = group
        self.num_prefills = 0
        self.factor = 1.0
        self.decode_rate = DEFAULT_DECODE_RATE
        self.overhead_s = DEFAULT_OVERHEAD_S
        self.decode_s = DEFAULT_DECODE_S
        self.output_tokens = DEFAULT_OUTPUT_TOKENS
        self._num_overheads = 0
        self._num_decodes = 0
        self._decode_tokens = self._decode_s = 0.0
        self._count = self._computed = self._seconds = self._expected_s = 0.0
        self._pending = (0.0, 0.0, 0.0)  # a sample that may not be complete: tokens, pairs, seconds

    @property
    def prefill_rate(self) -> float:
        if self._seconds:
            return self._computed / self._seconds
        return self.group.rate / self.factor

    @property
    def has_decode_rate(self) -> bool:
        """Whether ``decode_rate`` was measured on this replica, and is no guess."""
        return self._decode_tokens > 0.0

    def prefill_s(self, num_uncached_tokens: int, num_tokens: int) -> float:
        """Seconds to compute the rest of a prompt of ``num_tokens``."""
        group = self.group
        pairs = num_uncached_tokens * (num_tokens - 0.5 * num_uncached_tokens)
        return self.factor * (num_uncached_tokens * group.token_s + pairs * group.pair_s)

    def set_prior(self, mate: Rates) -> None:
        """Takes over what another replica of its class has learned, where this one has not."""
        if not self._num_overheads and mate._num_overheads:
            self.overhead_s = mate.overhead_s
        if not self._num_decodes and mate._num_decodes:
            self.decode_rate, self.decode_s = mate.decode_rate, mate.decode_s
            self.output_tokens = mate.output_tokens

    def on_prefill(self, num_computed_tokens: int, num_tokens: int, service_s: float, *, alone: bool) -> None:
        """A request began to answer; ``alone``: no other prompt was ahead of it."""
        if num_computed_tokens <= SMALL_PROMPT:
            if alone:
                self._num_overheads += 1
                step = max(0.05, 1.0 / self._num_overheads)
                self.overhead_s += step * (min(service_s, 1.0) - self.overhead_s)
            return
        if num_computed_tokens < MIN_PREFILL:
            return
        pairs = num_computed_tokens * (num_tokens - 0.5 * num_computed_tokens)
        expected_s = self.prefill_s(num_computed_tokens, num_tokens)
        if self.num_prefills >= 5:
            service_s = min(service_s, OUTLIER * (self.overhead_s + expected_s))
        if alone:  # an overhead that was only guessed must not eat what it takes to compute
            service_s = max(service_s - self.overhead_s, 0.2 * service_s)
        tokens, more_pairs, seconds = self._pending
        if tokens and service_s < TOGETHER * expected_s:
            self._pending = (tokens + num_computed_tokens, more_pairs + pairs, seconds + service_s)
            return
        self._pending = (num_computed_tokens, pairs, service_s)
        if not tokens:
            if self.group.num_samples:
                return
            tokens, more_pairs, seconds = self._pending  # the first of all: better than a guess
        self._learn(tokens, more_pairs, max(seconds, 1e-6))

    def on_decode(self, num_output_tokens: int, num_samples: int, decode_s: float) -> None:
        """A request ended after ``num_output_tokens`` of all its samples over ``decode_s``."""
        length = num_output_tokens / num_samples
        self._num_decodes += 1
        step = max(0.05, 1.0 / self._num_decodes)
        self.decode_s += step * (decode_s - self.decode_s)
        self.output_tokens += step * (length - self.output_tokens)
        if length > 1 and decode_s > 0:
            self._decode_tokens = MEMORY * self._decode_tokens + length - 1
            self._decode_s = MEMORY * self._decode_s + decode_s
            self.decode_rate = self._decode_tokens / self._decode_s

    def _learn(self, tokens: float, pairs: float, seconds: float) -> None:
        group = self.group
        self.num_prefills += 1
        group.learn(tokens, pairs, seconds / self.factor)
        self._count = MEMORY * self._count + 1.0
        self._computed = MEMORY * self._computed + tokens
        self._seconds = MEMORY * self._seconds + seconds
        self._expected_s = MEMORY * self._expected_s + tokens * group.token_s + pairs * group.pair_s
        prior = FACTOR_PRIOR * self._expected_s / self._count
        self.factor = (self._seconds + prior) / (self._expected_s + prior)
