// What attention is made of: scores and weighted sums of a chunk of keys for a few query vectors.
//
// Everything is a product of pairs of bfloat16: a query's pairs of dimensions with keys turned to
// [pair][16 keys], then a row's pairs of weights with values as [pair of keys][16 dimensions]. An output is one
// chain of additions, pairs ascending, whoever its neighbours in the tile are.
#pragma once
#include "vectors.h"

namespace {

constexpr int CHUNK = 128;            // keys; chunks end at its multiples
constexpr int PANEL = 64;             // columns of a product that lie side by side
constexpr int PANEL_VECTORS = PANEL / LANES;
constexpr int CHUNK_VECTORS = CHUNK / LANES, CHUNK_PAIRS = CHUNK / 2;
#ifdef __AVX512BF16__
constexpr int TILE_ROWS = 6, TILE_VECTORS = 4;
#elif defined(__AVX512F__)
constexpr int TILE_ROWS = 4, TILE_VECTORS = 4;
#else
constexpr int TILE_ROWS = 2, TILE_VECTORS = 2;
#endif

INLINE void add_dot(vf &sum, vu a, vu b) {
#ifdef __AVX512BF16__
    // as text: given the intrinsic, GCC keeps the sums in memory
    asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
#else
    sum = fma((vf)(a << 16), (vf)(b << 16), sum);
    sum = fma((vf)(a & 0xffff0000u), (vf)(b & 0xffff0000u), sum);
#endif
}

// c (R, N vectors) = a (R, pairs) · b (pairs, PANEL)
template <int R, int N>
__attribute__((noinline)) void multiply_tile(const uint32_t *a, int64_t a_stride, const uint32_t *b, int64_t pairs, float *c, int64_t c_stride) {
    vf sums[R][N] = {};
    for (int64_t pair = 0; pair < pairs; pair++) {
        vu column[N];
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) column[n] = load_line(b + pair * PANEL + n * LANES);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            vu one = a[r * a_stride + pair] - vu{};
#pragma GCC unroll 8
            for (int n = 0; n < N; n++) add_dot(sums[r][n], one, column[n]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) store(c + r * c_stride + n * LANES, sums[r][n]);
}

template <int N> INLINE void multiply_rows(int rows, const uint32_t *a, int64_t a_stride, const uint32_t *b, int64_t pairs, float *c, int64_t c_stride) {
    switch (rows) {
    case 1: return multiply_tile<1, N>(a, a_stride, b, pairs, c, c_stride);
    case 2: return multiply_tile<2, N>(a, a_stride, b, pairs, c, c_stride);
#if defined(__AVX512F__)
    case 3: return multiply_tile<3, N>(a, a_stride, b, pairs, c, c_stride);
    case 4: return multiply_tile<4, N>(a, a_stride, b, pairs, c, c_stride);
#endif
#if defined(__AVX512BF16__)
    case 5: return multiply_tile<5, N>(a, a_stride, b, pairs, c, c_stride);
    case 6: return multiply_tile<6, N>(a, a_stride, b, pairs, c, c_stride);
#endif
    }
}

// c (rows, vectors) = a (rows, pairs) · b, in panels `panel` elements apart
INLINE void multiply(int64_t rows, const uint32_t *a, int64_t a_stride, const uint32_t *b, int64_t panel, int vectors, int64_t pairs, float *c, int64_t c_stride) {
    for (int at = 0; at < vectors; at += TILE_VECTORS) {
        const uint32_t *columns = b + at / PANEL_VECTORS * panel + at % PANEL_VECTORS * LANES;
        const int count = vectors - at < TILE_VECTORS ? vectors - at : TILE_VECTORS;
        for (int64_t row = 0; row < rows; row += TILE_ROWS) {
            const int here = rows - row < TILE_ROWS ? (int)(rows - row) : TILE_ROWS;
            const uint32_t *from = a + row * a_stride;
            float *to = c + row * c_stride + at * LANES;
            if (count == 1) multiply_rows<1>(here, from, a_stride, columns, pairs, to, c_stride);
            if (count == 2) multiply_rows<2>(here, from, a_stride, columns, pairs, to, c_stride);
#ifdef __AVX512F__
            if (count == 3) multiply_rows<3>(here, from, a_stride, columns, pairs, to, c_stride);
            if (count == 4) multiply_rows<4>(here, from, a_stride, columns, pairs, to, c_stride);
#endif
        }
    }
}

// ---- keys and values as products take them ----

INLINE int64_t half_lines(int64_t dim) { return (dim + 31) / 32; }  // of 32 bfloat16

// 32 bfloat16 from `at` on of a row of dim, 0 beyond it
INLINE vu load_pairs(const uint16_t *row, int64_t at, int64_t dim) {
#ifdef __AVX512BW__
    if (at + 32 > dim) return (vu)_mm512_maskz_loadu_epi16((__mmask32)((1u << (dim - at)) - 1), row + at);
    return load_line(row + at);
#else
    vu out = {};
    memcpy(&out, row + at, at + 32 > dim ? 2 * (dim - at) : 64);
    return out;
#endif
}

#ifdef __AVX512F__
// 16 × 16 words
INLINE void transpose16(__m512i *r) {
    __m512i t[16];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
        r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0x88), t[4 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0x88);
        t[8 + i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0xdd), t[12 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0xdd);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[4 + i], 0x88), r[8 + i] = _mm512_shuffle_i32x4(t[i], t[4 + i], 0xdd);
        r[4 + i] = _mm512_shuffle_i32x4(t[8 + i], t[12 + i], 0x88), r[12 + i] = _mm512_shuffle_i32x4(t[8 + i], t[12 + i], 0xdd);
    }
}
#endif

// Where the keys and values of a chunk are.
struct Addresses {
    const uint16_t *keys[CHUNK], *values[CHUNK];
};

// Into the second-level cache: more can be under way to there than to the first.
INLINE void fetch(const uint16_t *at) { __builtin_prefetch(at, 0, 2); }

// 16 keys of dim, from `at` on → columns of [pair][PANEL keys], 0 from dim to the next multiple of 32. The next
// chunk's are fetched.
INLINE void turn_keys(const Addresses &where, const Addresses &next, int at, int64_t dim, uint32_t *columns) {
    const uint16_t *const *from = where.keys + at;
    const int64_t lines = half_lines(dim);
    for (int i = at; i < at + LANES; i++)
        for (int64_t line = 0; line < lines; line++) fetch(next.keys[i] + line * 32);
    for (int64_t line = 0; line < lines; line++, columns += LANES * PANEL) {
#ifdef __AVX512F__
        __m512i block[LANES];
        if (line * 32 + 32 <= dim) {
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++) block[i] = (__m512i)load_line(from[i] + line * 32);
        } else {
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++) block[i] = (__m512i)load_pairs(from[i], line * 32, dim);
        }
        transpose16(block);
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) memcpy(columns + i * PANEL, &block[i], 64);
#else
        for (int i = 0; i < LANES; i++) {
            vu row = load_pairs(from[i], line * 32, dim);
            for (int j = 0; j < LANES; j++) columns[j * PANEL + i] = row[j];
        }
#endif
    }
}

// Of 32 dimensions of two keys' values, the first vector has dimensions 0-3, 8-11, 16-19, 24-27 in pairs, the
// second the others: what one unpack instruction makes.
INLINE void pair_up(vu first, vu second, vu &low, vu &high) {
#ifdef __AVX512BW__
    low = (vu)_mm512_unpacklo_epi16((__m512i)first, (__m512i)second);
    high = (vu)_mm512_unpackhi_epi16((__m512i)first, (__m512i)second);
#else
    const uint16_t *a = (const uint16_t *)&first, *b = (const uint16_t *)&second;
    for (int i = 0; i < LANES; i++) {
        int at = i / 4 * 8 + i % 4;
        low[i] = a[at] | (uint32_t)b[at] << 16, high[i] = a[at + 4] | (uint32_t)b[at + 4] << 16;
    }
#endif
}
// The order of pair_up → the dimensions' own.
INLINE void put_in_order(const float *pairs, float *to) {
    for (int i = 0; i < LANES; i += 4) {
        memcpy(to + 2 * i, pairs + i, 16);
        memcpy(to + 2 * i + 4, pairs + LANES + i, 16);
    }
}

// Values of dim → panels of [pair of keys][PANEL dimensions]
INLINE void pair_values(const Addresses &where, const Addresses &next, int pairs, int64_t dim, uint32_t *to) {
    constexpr int64_t panel = CHUNK_PAIRS * PANEL;
    const int64_t lines = half_lines(dim);
    for (int pair = 0; pair < pairs; pair++) {
        const uint16_t *first = where.values[2 * pair], *second = where.values[2 * pair + 1];
        for (int64_t line = 0; line < lines; line++) {
            fetch(next.values[2 * pair] + line * 32), fetch(next.values[2 * pair + 1] + line * 32);
            vu low, high;
            pair_up(load_pairs(first, line * 32, dim), load_pairs(second, line * 32, dim), low, high);
            uint32_t *columns = to + line / 2 * panel + pair * PANEL + line % 2 * 32;
            memcpy(columns, &low, 64), memcpy(columns + LANES, &high, 64);
        }
    }
}

// c (R, 2 · L vectors) = a (R, pairs) · values from dimension d on, paired up as they are read: what
// multiply_tile makes of pair_values
template <int R, int L>
__attribute__((noinline)) void weigh_values(const uint32_t *a, int64_t a_stride, const Addresses &where, const Addresses &next, int64_t pairs, int64_t d, int64_t dim, float *c, int64_t c_stride) {
    vf sums[R][2 * L] = {};
    for (int64_t pair = 0; pair < pairs; pair++) {
        vu column[2 * L];
#pragma GCC unroll 2
        for (int line = 0; line < L; line++) {
            const int64_t from = d + line * 32;
            fetch(next.values[2 * pair] + from), fetch(next.values[2 * pair + 1] + from);
            pair_up(load_pairs(where.values[2 * pair], from, dim), load_pairs(where.values[2 * pair + 1], from, dim), column[2 * line], column[2 * line + 1]);
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            vu one = a[r * a_stride + pair] - vu{};
#pragma GCC unroll 4
            for (int n = 0; n < 2 * L; n++) add_dot(sums[r][n], one, column[n]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int n = 0; n < 2 * L; n++) store(c + r * c_stride + n * LANES, sums[r][n]);
}
template <int L> INLINE void weigh_rows(int rows, const uint32_t *a, int64_t a_stride, const Addresses &where, const Addresses &next, int64_t pairs, int64_t d, int64_t dim, float *c, int64_t c_stride) {
    switch (rows) {
    case 1: return weigh_values<1, L>(a, a_stride, where, next, pairs, d, dim, c, c_stride);
    case 2: return weigh_values<2, L>(a, a_stride, where, next, pairs, d, dim, c, c_stride);
#if defined(__AVX512F__)
    case 3: return weigh_values<3, L>(a, a_stride, where, next, pairs, d, dim, c, c_stride);
    case 4: return weigh_values<4, L>(a, a_stride, where, next, pairs, d, dim, c, c_stride);
#endif
#if defined(__AVX512BF16__)
    case 5: return weigh_values<5, L>(a, a_stride, where, next, pairs, d, dim, c, c_stride);
    case 6: return weigh_values<6, L>(a, a_stride, where, next, pairs, d, dim, c, c_stride);
#endif
    }
}
INLINE void multiply_values(int64_t rows, const uint32_t *a, int64_t a_stride, const Addresses &where, const Addresses &next, int64_t pairs, int64_t dim, float *c, int64_t c_stride) {
    for (int64_t row = 0; row < rows; row += TILE_ROWS) {
        const int here = rows - row < TILE_ROWS ? (int)(rows - row) : TILE_ROWS;
        const uint32_t *from = a + row * a_stride;
        int64_t d = 0;
        for (; TILE_VECTORS >= 4 && d + 32 < dim; d += 64) weigh_rows<2>(here, from, a_stride, where, next, pairs, d, dim, c + row * c_stride + d, c_stride);
        for (; d < dim; d += 32) weigh_rows<1>(here, from, a_stride, where, next, pairs, d, dim, c + row * c_stride + d, c_stride);
    }
}

// ---- scores → weights ----

// 2^x to 3e-6, exactly 1 at 0; 0 or nearly so far below
INLINE vf power_of_two(vf x) {
#ifdef __AVX512DQ__
    vf r = (vf)_mm512_reduce_ps((__m512)x, 0x09);  // x - floor(x)
    vf p = all(0.0134266848f);
    p = fma(p, r, all(0.0522424729f));
    p = fma(p, r, all(0.241280206f));
    p = fma(p, r, all(0.693044845f));
    p = fma(p, r, all(1.0f));
    return (vf)_mm512_scalef_ps((__m512)p, (__m512)x);
#else
    return exponential(x * 0.693147182f);
#endif
}

INLINE float largest_lane(vf v) {
#ifdef __AVX512F__
    return _mm512_reduce_max_ps((__m512)v);
#else
    return largest(v);
#endif
}
INLINE float sum_lanes(vf v) {
#ifdef __AVX512F__
    return _mm512_reduce_add_ps((__m512)v);
#else
    return sum(v);
#endif
}

// Scores of a row, `vectors` of them, of which [from, to) count → its weights as bfloat16 in the same place,
// relative to the largest score. most: that score times factor (the softmax is in powers of two), -FLT_MAX when
// none counts; total: the weights' sum.
template <bool WHOLE> INLINE void weigh(float *scores, int vectors, int from, int to, float factor, float &most_out, float &total_out) {
    constexpr int STEPS = CHUNK_VECTORS;
    const int count = WHOLE ? STEPS : vectors;
    vi lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    vf best = all(-FLT_MAX);
#pragma GCC unroll 8
    for (int i = 0; i < count; i++) {
        vf s = load(scores + i * LANES);
        if (!WHOLE) {
            vi key = lane + i * LANES;
            s = (key >= from) & (key < to) ? s : all(-FLT_MAX);
        }
        best = s > best ? s : best;
    }
    float most = largest_lane(best) * factor;
    most = most > -FLT_MAX ? most : -FLT_MAX;
    vf sums = {};
    uint16_t *weights = (uint16_t *)scores;
#pragma GCC unroll 4
    for (int i = 0; i < count; i += 2) {
        vf p[2] = {};
#pragma GCC unroll 2
        for (int j = 0; j < 2; j++) {
            if (!WHOLE && i + j >= count) break;
            vf s = load(scores + (i + j) * LANES);
            p[j] = power_of_two(fma(s, all(factor), all(-most)));
            if (!WHOLE) {
                vi key = lane + (i + j) * LANES;
                p[j] = (key >= from) & (key < to) ? p[j] : vf{};
            }
            sums += p[j];
        }
        vh halves[2] = {narrow(p[0]), narrow(p[1])};
        memcpy(weights + i * LANES, halves, 64);
    }
    most_out = most, total_out = sum_lanes(sums);
}

INLINE void cap_scores(float *scores, int vectors, float scale, float softcap) {
    for (int i = 0; i < vectors; i++)
        store(scores + i * LANES, softcap * hyperbolic_tangent(load(scores + i * LANES) * (scale / softcap)));
}

// ---- chunks joined, in ascending order ----

// What 16 query vectors know of the chunks so far: the softmax's largest exponent and its sum.
struct Softmax {
    vf most, total;

    // shares of what was and of what comes
    INLINE_MEMBER void join(vf more, vf sum, vf &was, vf &comes) {
        vf best = more > most ? more : most;
        was = power_of_two(most - best), comes = power_of_two(more - best);
        total = fma(sum, comes, total * was);
        most = best;
    }
};

}  // namespace
