// Products of bfloat16 weights with rows of bfloat16, summed in float32.
//
//     line   │ output 0: k, k+1 │ output 1: k, k+1 │ … │ output 15: k, k+1 │     64 bytes
//     unit   │ line of outputs 0 … 15, k = 0 │ of outputs 16 … 31, k = 0 │ of 0 … 15, k = 2 │ …
//
// No horizontal sums. An output is one accumulator that takes pairs of k in ascending order, whatever the tile.
#pragma once
#include "weights.h"

namespace {

INLINE int64_t padded_pairs(int64_t in) { return (in + 15) / 16 * 8; }
INLINE int64_t pairs_stride(int64_t n) { return (padded_pairs(n) * 4 + 63) / 64 * 64; }

// values [at, at + count) of a row of pairs, 0 up to the next multiple of 16
INLINE void put_pairs(char *row, int64_t at, const float *values, int64_t count) {
    uint16_t *to = (uint16_t *)row + at;
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        vh h = narrow(load(values + i));
        memcpy(to + i, &h, sizeof h);
    }
    if (i == count) return;
    float rest[LANES] = {};
    memcpy(rest, values + i, (count - i) * 4);
    vh h = narrow(load(rest));
    memcpy(to + i, &h, sizeof h);
}

INLINE int64_t bf16_unit_bytes(int64_t in) { return padded_pairs(in) * 128; }

inline void bf16_pack(const char *const *rows, int64_t in, char *unit) {
    constexpr int64_t SPAN = 16;  // pairs of every row at a time: what is written stays in the first-level cache
    for (int64_t from = 0; from < in / 2; from += SPAN)
        for (int i = 0; i < UNIT; i++)
            for (int64_t pair = from; rows[i] && pair < from + SPAN && pair < in / 2; pair++) memcpy(unit + pair * 128 + i * 4, rows[i] + pair * 4, 4);
    if (in % 2)
        for (int i = 0; i < UNIT; i++)
            if (rows[i]) memcpy(unit + in / 2 * 128 + i * 4, rows[i] + in / 2 * 4, 2);
}

#if defined(__AVX512BF16__)
// an instruction by name: what compilers make of the intrinsic keeps tiles of sums in memory
INLINE void dot_pairs(__m512 &sum, __m512i line, const char *pair) {
    asm("vdpbf16ps %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(line), "m"(*(const int32_t *)pair));
}

// Few rows read as fast as the CPU's own prefetching goes, and asking for lines as well costs some of that (one
// row on Zen 4: 32 GB/s a thread against 23); with more rows it comes too late (8 rows: 21, and 27 when asked for).
constexpr int FETCHED_FROM = 7;

template <int R> void bf16_tile(const char *unit, int64_t in, const char *x, int64_t stride, vf *out) {
    __m512 sum[R][2];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) sum[r][0] = sum[r][1] = _mm512_setzero_ps();
    const char *end = unit + padded_pairs(in) * 128;
#pragma GCC unroll 2
    for (; unit != end; unit += 128, x += 4) {
        const __m512i line0 = _mm512_loadu_si512(unit), line1 = _mm512_loadu_si512(unit + 64);
        if (R >= FETCHED_FROM) __builtin_prefetch(unit + PREFETCH, 0, 2), __builtin_prefetch(unit + PREFETCH + 64, 0, 2);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) dot_pairs(sum[r][0], line0, x + r * stride), dot_pairs(sum[r][1], line1, x + r * stride);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) out[2 * r] = (vf)sum[r][0], out[2 * r + 1] = (vf)sum[r][1];
}
constexpr int BF16_TILE = 14;  // 28 of 32 registers hold sums
#elif defined(__AVX512F__) || !defined(__AVX2__) || !defined(__FMA__)
template <int R> void bf16_tile(const char *unit, int64_t in, const char *x, int64_t stride, vf *out) {
    vf sum[R][2] = {};
    const char *end = unit + padded_pairs(in) * 128;
    for (; unit != end; unit += 128, x += 4) {
        const vu line0 = load_line(unit), line1 = load_line(unit + 64);
        const vf low0 = (vf)(line0 << 16), high0 = (vf)(line0 & 0xffff0000u), low1 = (vf)(line1 << 16), high1 = (vf)(line1 & 0xffff0000u);
        __builtin_prefetch(unit + PREFETCH, 0, 2), __builtin_prefetch(unit + PREFETCH + 64, 0, 2);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
            uint32_t both;
            memcpy(&both, x + r * stride, 4);
            const vu pair = both - vu{};
            const vf first = (vf)(pair << 16), second = (vf)(pair & 0xffff0000u);
            sum[r][0] = fma(high0, second, fma(low0, first, sum[r][0]));
            sum[r][1] = fma(high1, second, fma(low1, first, sum[r][1]));
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) out[2 * r] = sum[r][0], out[2 * r + 1] = sum[r][1];
}
constexpr int BF16_TILE = 10;
#else
// Two rows' sums, their pair and half a line, widened, fit sixteen registers of 8 floats.
template <int R> void bf16_tile(const char *unit, int64_t in, const char *x, int64_t stride, vf *out) {
    __m256 sum[R][4];
#pragma GCC unroll 2
    for (int r = 0; r < R; r++) sum[r][0] = sum[r][1] = sum[r][2] = sum[r][3] = _mm256_setzero_ps();
    const __m256i upper = _mm256_set1_epi32((int)0xffff0000u);
    const char *end = unit + padded_pairs(in) * 128;
    for (; unit != end; unit += 128, x += 4) {
        __m256 first[R], second[R];
#pragma GCC unroll 2
        for (int r = 0; r < R; r++) {
            int32_t both;
            memcpy(&both, x + r * stride, 4);
            const __m256i pair = _mm256_set1_epi32(both);
            first[r] = _mm256_castsi256_ps(_mm256_slli_epi32(pair, 16)), second[r] = _mm256_castsi256_ps(_mm256_and_si256(pair, upper));
        }
        if (R > 1) __builtin_prefetch(unit + PREFETCH, 0, 2), __builtin_prefetch(unit + PREFETCH + 64, 0, 2);  // as above
#pragma GCC unroll 4
        for (int part = 0; part < 4; part++) {
            const __m256i line = _mm256_loadu_si256((const __m256i *)(unit + part * 32));
            const __m256 low = _mm256_castsi256_ps(_mm256_slli_epi32(line, 16)), high = _mm256_castsi256_ps(_mm256_and_si256(line, upper));
#pragma GCC unroll 2
            for (int r = 0; r < R; r++) sum[r][part] = _mm256_fmadd_ps(high, second[r], _mm256_fmadd_ps(low, first[r], sum[r][part]));
        }
    }
#pragma GCC unroll 2
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int part = 0; part < 4; part++) _mm256_storeu_ps((float *)(out + 2 * r) + part * 8, sum[r][part]);
}
#define HR_PAIRWISE
constexpr int BF16_TILE = 8;
#endif

inline void bf16_rows(int rows, const char *unit, int64_t in, const char *x, int64_t stride, vf *out) {
#ifdef HR_PAIRWISE
    int r = 0;
    for (; r + 2 <= rows; r += 2) bf16_tile<2>(unit, in, x + r * stride, stride, out + 2 * r);
    if (r < rows) bf16_tile<1>(unit, in, x + r * stride, stride, out + 2 * r);
#else
    switch (rows) {
#define HR_ROWS(n) \
    case n: return bf16_tile<n>(unit, in, x, stride, out);
        HR_ROWS(1) HR_ROWS(2) HR_ROWS(3) HR_ROWS(4) HR_ROWS(5) HR_ROWS(6) HR_ROWS(7) HR_ROWS(8) HR_ROWS(9) HR_ROWS(10)
#ifdef __AVX512BF16__
        HR_ROWS(11) HR_ROWS(12) HR_ROWS(13) HR_ROWS(14)
#endif
#undef HR_ROWS
    }
#endif
}

constexpr Product BF16_PRODUCT = {PAIRS, 1, BF16_TILE, BF16_TILE, bf16_unit_bytes, bf16_pack, bf16_rows, bf16_rows, nullptr, nullptr};

}  // namespace
