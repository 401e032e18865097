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
    uint16_t *to = (uint16_t *)unit;
    for (int64_t k = 0; k < padded_pairs(in) * 2; k += 2)
        for (int i = 0; i < UNIT; i++, to += 2)
            for (int j = 0; j < 2; j++)
                if (rows[i] && k + j < in) memcpy(to + j, rows[i] + (k + j) * 2, 2);
}

#if defined(__AVX512BF16__)
// an instruction by name: what compilers make of the intrinsic keeps tiles of sums in memory
INLINE void dot_pairs(__m512 &sum, __m512i line, const char *pair) {
    asm("vdpbf16ps %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(line), "m"(*(const int32_t *)pair));
}

template <int R> void bf16_tile(const char *unit, int64_t in, const char *x, int64_t stride, vf *out) {
    __m512 sum[R][2];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) sum[r][0] = sum[r][1] = _mm512_setzero_ps();
    const char *end = unit + padded_pairs(in) * 128;
#pragma GCC unroll 2
    for (; unit != end; unit += 128, x += 4) {
        const __m512i line0 = _mm512_loadu_si512(unit), line1 = _mm512_loadu_si512(unit + 64);
        __builtin_prefetch(unit + PREFETCH, 0, 2), __builtin_prefetch(unit + PREFETCH + 64, 0, 2);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) dot_pairs(sum[r][0], line0, x + r * stride), dot_pairs(sum[r][1], line1, x + r * stride);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) out[2 * r] = (vf)sum[r][0], out[2 * r + 1] = (vf)sum[r][1];
}
constexpr int BF16_TILE = 14;
#else
// Two rows' sums and one line, widened, fit sixteen registers of 8 floats.
template <int R> void bf16_tile(const char *unit, int64_t in, const char *x, int64_t stride, vf *out) {
    vf sum[R][2] = {};
    for (int64_t pair = 0; pair < padded_pairs(in); pair++, unit += 128, x += 4)
        for (int v = 0; v < 2; v++) {
            vu line = load_line(unit + v * 64);
            __builtin_prefetch(unit + PREFETCH + v * 64, 0, 2);
            vf low = (vf)(line << 16), high = (vf)(line & 0xffff0000u);
            for (int r = 0; r < R; r++) {
                uint16_t both[2];
                memcpy(both, x + r * stride, 4);
                sum[r][v] = fma(high, all(widen1(both[1])), fma(low, all(widen1(both[0])), sum[r][v]));
            }
        }
    for (int r = 0; r < R; r++) out[2 * r] = sum[r][0], out[2 * r + 1] = sum[r][1];
}
constexpr int BF16_TILE = 8;
#endif

inline void bf16_rows(int rows, const char *unit, int64_t in, const char *x, int64_t stride, vf *out) {
    switch (rows) {
#define HR_ROWS(n) \
    case n: return bf16_tile<n>(unit, in, x, stride, out);
        HR_ROWS(1) HR_ROWS(2) HR_ROWS(3) HR_ROWS(4) HR_ROWS(5) HR_ROWS(6) HR_ROWS(7) HR_ROWS(8)
#if defined(__AVX512BF16__)
        HR_ROWS(9) HR_ROWS(10) HR_ROWS(11) HR_ROWS(12) HR_ROWS(13) HR_ROWS(14)
#endif
#undef HR_ROWS
    }
}

constexpr Product BF16_PRODUCT = {PAIRS, 1, BF16_TILE, BF16_TILE, bf16_unit_bytes, bf16_pack, bf16_rows, bf16_rows, nullptr, nullptr};

}  // namespace
