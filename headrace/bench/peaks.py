"""How many multiply-adds a second the cores can do at all: the widest instruction for a dtype, on registers.

A matrix product cannot be faster; how close it comes is its own affair. Instructions: for int8 the dot
product of bytes (VNNI), for bfloat16 that of pairs (AVX512_BF16), for float32 FMA.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path

_SOURCE = r"""
#if defined(__x86_64__)
#include <immintrin.h>
#include <stdlib.h>
#include <time.h>

static double now(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return at.tv_sec + 1e-9 * at.tv_nsec;
}

static int compare(const void *one, const void *other) {
    double a = *(const double *)one, b = *(const double *)other;
    return (a > b) - (a < b);
}

/* all threads at once, each by its own clock: the median of short runs, so that neither a neighbour counts
   nor the end, where others are done already. The loop keeps a and b opaque, so that nothing is computed
   ahead, and has enough sums to hide the latency. */
#define SUMS 12
#define STEPS 20000
#define RUNS 1000
#define PEAK(NAME, FACTOR, SUM, A, OPS, STEP)                                      \
    double NAME(int threads) {                                                     \
        double rate = 0.0;                                                         \
        _Pragma("omp parallel num_threads(threads) reduction(+ : rate)")           \
        {                                                                          \
            FACTOR a = A, b = A;                                                   \
            SUM sum[SUMS];                                                         \
            double taken[RUNS];                                                    \
            for (int i = 0; i < SUMS; i++) sum[i] = (SUM){0};                      \
            for (int run = 0; run < RUNS; run++) {                                 \
                double began = now();                                              \
                for (int step = 0; step < STEPS; step++) {                         \
                    for (int i = 0; i < SUMS; i++) sum[i] = STEP;                  \
                    __asm__ volatile("" : "+v"(a), "+v"(b));                       \
                }                                                                  \
                for (int i = 0; i < SUMS; i++) __asm__ volatile("" : "+v"(sum[i])); \
                taken[run] = now() - began;                                        \
            }                                                                      \
            qsort(taken, RUNS, sizeof *taken, compare);                            \
            rate += (double)STEPS * SUMS * OPS / taken[RUNS / 2];                  \
        }                                                                          \
        return rate;                                                               \
    }

#if defined(__AVX512VNNI__)
PEAK(peak_int8, __m512i, __m512i, _mm512_set1_epi8(1), 128, _mm512_dpbusd_epi32(sum[i], a, b))
#elif defined(__AVXVNNI__)
PEAK(peak_int8, __m256i, __m256i, _mm256_set1_epi8(1), 64, _mm256_dpbusd_avx_epi32(sum[i], a, b))
#endif
#if defined(__AVX512BF16__)
PEAK(peak_bfloat16, __m512bh, __m512, (__m512bh)_mm512_set1_epi16(0x3f80), 64, _mm512_dpbf16_ps(sum[i], a, b))
#endif
#if defined(__AVX512F__)
PEAK(peak_float32, __m512, __m512, _mm512_set1_ps(1.0f), 32, _mm512_fmadd_ps(a, b, sum[i]))
#elif defined(__FMA__)
PEAK(peak_float32, __m256, __m256, _mm256_set1_ps(1.0f), 16, _mm256_fmadd_ps(a, b, sum[i]))
#endif
#endif
"""


def peak_rate(dtype: str, threads: int) -> float:
    """Operations per second of ``threads`` together, two a multiply-add; 0 where there is no compiler or no
    such instruction. Takes some tenths of a second."""
    library = _library()
    if library is None or not hasattr(library, f"peak_{dtype}"):
        return 0.0
    run = library[f"peak_{dtype}"]
    run.restype = ctypes.c_double
    return float(run(ctypes.c_int(threads)))


@lru_cache
def _library() -> ctypes.CDLL | None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "peaks.c", Path(folder) / "peaks.so"
        source.write_text(_SOURCE)
        flags = ["-O3", "-march=native", "-fopenmp", "-shared", "-fPIC"]
        command = [compiler, *flags, str(source), "-o", str(library)]
        if subprocess.run(command, capture_output=True, check=False).returncode != 0:
            return None
        return ctypes.CDLL(str(library))
