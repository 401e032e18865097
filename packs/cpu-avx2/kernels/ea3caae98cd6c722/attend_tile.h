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
constexpr int TILE_ROWS = 4, TILE_VECTORS = 1;
#endif
#ifdef __AVX512F__
#define UNROLL _Pragma("GCC unroll 8")  // where there are registers for it
#else
#define UNROLL
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

}  // namespace

#if defined(__AVX2__) && defined(__FMA__) && !defined(__AVX512F__)
#define ATTEND_AVX2 1
#include "attend_avx2.h"
#else
#define ATTEND_AVX2 0
#endif

namespace {

// c (R, N vectors) = a (R, pairs) · b (pairs, PANEL)
#if !ATTEND_AVX2
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
#endif

template <int N> INLINE void multiply_rows(int rows, const uint32_t *a, int64_t a_stride, const uint32_t *b, int64_t pairs, float *c, int64_t c_stride) {
    switch (rows) {
    case 1: return multiply_tile<1, N>(a, a_stride, b, pairs, c, c_stride);
    case 2: return multiply_tile<2, N>(a, a_stride, b, pairs, c, c_stride);
    case 3: return multiply_tile<3, N>(a, a_stride, b, pairs, c, c_stride);
    case 4: return multiply_tile<4, N>(a, a_stride, b, pairs, c, c_stride);
#if defined(__AVX512BF16__)
    case 5: return multiply_tile<5, N>(a, a_stride, b, pairs, c, c_stride);
    case 6: return multiply_tile<6, N>(a, a_stride, b, pairs, c, c_stride);
#endif
    }
}

// Vectors [first, end) of c (rows, end) = a (rows, pairs) · b, in panels `panel` elements apart
INLINE void multiply(int64_t rows, const uint32_t *a, int64_t a_stride, const uint32_t *b, int64_t panel, int first, int end, int64_t pairs, float *c, int64_t c_stride) {
    for (int at = first, count; at < end; at += count) {
        const uint32_t *columns = b + at / PANEL_VECTORS * panel + at % PANEL_VECTORS * LANES;
        count = TILE_VECTORS - at % TILE_VECTORS < end - at ? TILE_VECTORS - at % TILE_VECTORS : end - at;
        for (int64_t row = 0; row < rows; row += TILE_ROWS) {
            const int here = rows - row < TILE_ROWS ? (int)(rows - row) : TILE_ROWS;
            const uint32_t *from = a + row * a_stride;
            float *to = c + row * c_stride + at * LANES;
            if (count == 1) multiply_rows<1>(here, from, a_stride, columns, pairs, to, c_stride);
#ifdef __AVX512F__
            if (count == 2) multiply_rows<2>(here, from, a_stride, columns, pairs, to, c_stride);
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
INLINE void transpose(__m512i *r) {
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
        const bool inside = line * 32 + 32 <= dim;
#ifdef __AVX512F__
        __m512i block[LANES];
        if (inside) {
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++) block[i] = (__m512i)load_line(from[i] + line * 32);
        } else {
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++) block[i] = (__m512i)load_pairs(from[i], line * 32, dim);
        }
        transpose(block);
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) memcpy(columns + i * PANEL, &block[i], 64);
#else
        alignas(64) uint16_t tail[LANES][32] = {};
        const uint16_t *rows[LANES];
        for (int i = 0; i < LANES; i++) {
            rows[i] = inside ? from[i] + line * 32 : tail[i];
            if (!inside) memcpy(tail[i], from[i] + line * 32, 2 * (dim - line * 32));
        }
#if ATTEND_AVX2
        turn_line(rows, columns);
#else
        for (int i = 0; i < LANES; i++)
            for (int j = 0; j < LANES; j++) memcpy(columns + j * PANEL + i, rows[i] + 2 * j, 4);
#endif
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
    for (int part = 0; part < 8; part++) {  // of 16 bytes
        uint16_t a[8], b[8];
        memcpy(a, (const char *)&first + 16 * (part % 4), 16), memcpy(b, (const char *)&second + 16 * (part % 4), 16);
        for (int i = 0; i < 4; i++) {
            const int at = part / 4 * 4 + i;
            (part < 4 ? low : high)[part % 4 * 4 + i] = a[at] | (uint32_t)b[at] << 16;
        }
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
INLINE void pair_values(const Addresses &where, const Addresses &next, int from, int end, int64_t dim, uint32_t *to) {
    constexpr int64_t panel = CHUNK_PAIRS * PANEL;
    const int64_t lines = half_lines(dim);
    for (int pair = from; pair < end; pair++) {
        const uint16_t *first = where.values[2 * pair], *second = where.values[2 * pair + 1];
        for (int64_t line = 0; line < lines; line++) {
            fetch(next.values[2 * pair] + line * 32), fetch(next.values[2 * pair + 1] + line * 32);
            uint32_t *columns = to + line / 2 * panel + pair * PANEL + line % 2 * 32;
#if ATTEND_AVX2
            if (line * 32 + 32 <= dim) {
                pair_line(first + line * 32, second + line * 32, columns);
                continue;
            }
#endif
            vu low, high;
            pair_up(load_pairs(first, line * 32, dim), load_pairs(second, line * 32, dim), low, high);
            memcpy(columns, &low, 64), memcpy(columns + LANES, &high, 64);
        }
    }
}

#ifdef __AVX512F__
// Scores of R query vectors on keys [at, at + 32): what multiply_tile makes of turn_keys, from registers. The next chunk's
// keys are fetched, and those of `beyond`, which may be null.
template <int R>
__attribute__((noinline)) void score_keys(const uint32_t *q, int64_t stride, const Addresses &where, const Addresses &next, const Addresses *beyond, int at, int64_t dim, float *scores) {
    vf sums[R][2] = {};
    for (int64_t line = 0; line < half_lines(dim); line++) {
        __m512i block[LANES];
        alignas(64) __m512i first[LANES];
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) {
            fetch(next.keys[at + i] + line * 32), fetch(next.keys[at + LANES + i] + line * 32);
            if (beyond) fetch(beyond->keys[at + i] + line * 32), fetch(beyond->keys[at + LANES + i] + line * 32);
            block[i] = (__m512i)load_pairs(where.keys[at + i], line * 32, dim);
        }
        transpose(block);
        memcpy(first, block, sizeof first);
        asm volatile("" ::: "memory");  // or loads of the second sixteen push the first out of registers twice
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) block[i] = (__m512i)load_pairs(where.keys[at + LANES + i], line * 32, dim);
        transpose(block);
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++)
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) {
                const vu one = q[r * stride + line * LANES + i] - vu{};
                add_dot(sums[r][0], (vu)first[i], one), add_dot(sums[r][1], (vu)block[i], one);
            }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) store(scores + r * CHUNK + at, sums[r][0]), store(scores + r * CHUNK + at + LANES, sums[r][1]);
}
INLINE void score_turned(int64_t rows, const uint32_t *q, int64_t stride, const Addresses &where, const Addresses &next, const Addresses *beyond, int at, int64_t dim, float *scores) {
    for (; rows >= 3; rows -= 3, q += 3 * stride, scores += 3 * CHUNK) score_keys<3>(q, stride, where, next, beyond, at, dim, scores);
    if (rows == 2) score_keys<2>(q, stride, where, next, beyond, at, dim, scores);
    if (rows == 1) score_keys<1>(q, stride, where, next, beyond, at, dim, scores);
}

// c (R, 2 · L vectors) = a (R, pairs) · values of pairs [from, to) from dimension d on, paired up as they are read: what
// multiply_tile makes of pair_values
template <int R, int L>
__attribute__((noinline)) void weigh_values(const uint32_t *a, int64_t a_stride, const Addresses &where, const Addresses &next, const Addresses *beyond, int64_t from, int64_t to, int64_t d, int64_t dim, float *c, int64_t c_stride) {
    vf sums[R][2 * L] = {};
    for (int64_t pair = from; pair < to; pair++) {
        vu column[2 * L];
#pragma GCC unroll 2
        for (int line = 0; line < L; line++) {
            const int64_t at = d + line * 32;
            fetch(next.values[2 * pair] + at), fetch(next.values[2 * pair + 1] + at);
            if (beyond) fetch(beyond->values[2 * pair] + at), fetch(beyond->values[2 * pair + 1] + at);
            pair_up(load_pairs(where.values[2 * pair], at, dim), load_pairs(where.values[2 * pair + 1], at, dim), column[2 * line], column[2 * line + 1]);
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
template <int L> INLINE void weigh_rows(int rows, const uint32_t *a, int64_t a_stride, const Addresses &where, const Addresses &next, const Addresses *beyond, int64_t from, int64_t to, int64_t d, int64_t dim, float *c, int64_t c_stride) {
    switch (rows) {
    case 1: return weigh_values<1, L>(a, a_stride, where, next, beyond, from, to, d, dim, c, c_stride);
    case 2: return weigh_values<2, L>(a, a_stride, where, next, beyond, from, to, d, dim, c, c_stride);
    case 3: return weigh_values<3, L>(a, a_stride, where, next, beyond, from, to, d, dim, c, c_stride);
    case 4: return weigh_values<4, L>(a, a_stride, where, next, beyond, from, to, d, dim, c, c_stride);
#if defined(__AVX512BF16__)
    case 5: return weigh_values<5, L>(a, a_stride, where, next, beyond, from, to, d, dim, c, c_stride);
    case 6: return weigh_values<6, L>(a, a_stride, where, next, beyond, from, to, d, dim, c, c_stride);
#endif
    }
}
INLINE void multiply_values(int64_t rows, const uint32_t *a, int64_t a_stride, const Addresses &where, const Addresses &next, const Addresses *beyond, int64_t from, int64_t to, int64_t dim, float *c, int64_t c_stride) {
    for (int64_t row = 0; row < rows; row += TILE_ROWS) {
        const int here = rows - row < TILE_ROWS ? (int)(rows - row) : TILE_ROWS;
        const uint32_t *weights = a + row * a_stride;
        int64_t d = 0;
        for (; d + 32 < dim; d += 64) weigh_rows<2>(here, weights, a_stride, where, next, beyond, from, to, d, dim, c + row * c_stride + d, c_stride);
        for (; d < dim; d += 32) weigh_rows<1>(here, weights, a_stride, where, next, beyond, from, to, d, dim, c + row * c_stride + d, c_stride);
    }
}
#endif

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

// Four rows' vectors → each row's sum, or its largest, by one tree wherever the row is.
template <bool SUM> INLINE void reduce4(const vf *rows, float *out) {
#ifdef __AVX512F__
    auto both = [](__m512 x, __m512 y) __attribute__((always_inline)) { return SUM ? _mm512_add_ps(x, y) : _mm512_max_ps(x, y); };
    const __m512 a = (__m512)rows[0], b = (__m512)rows[1], c = (__m512)rows[2], d = (__m512)rows[3];
    const __m512 ac = both(_mm512_unpacklo_ps(a, c), _mm512_unpackhi_ps(a, c));
    const __m512 bd = both(_mm512_unpacklo_ps(b, d), _mm512_unpackhi_ps(b, d));
    __m512 abcd = both(_mm512_unpacklo_ps(ac, bd), _mm512_unpackhi_ps(ac, bd));
    abcd = both(abcd, _mm512_shuffle_f32x4(abcd, abcd, 0x4e));
    abcd = both(abcd, _mm512_shuffle_f32x4(abcd, abcd, 0xb1));
    _mm_storeu_ps(out, _mm512_castps512_ps128(abcd));
#else
    out[0] = SUM ? sum(rows[0]) : largest(rows[0]);  // the only row of weigh without AVX-512
#endif
}

INLINE vf most_of(vf a, vf b) {
#ifdef __AVX512F__
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return larger(a, b);
#endif
}

INLINE void narrow_two(vf first, vf second, uint16_t *to) {
#ifdef __AVX512BF16__
    __m512bh both = _mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
    memcpy(to, &both, 64);
#else
    vh halves[2] = {narrow(first), narrow(second)};
    memcpy(to, halves, 64);
#endif
}

// Scores of R rows of CHUNK, of which [from[r], to[r]) count, all in vectors [first, end) → those vectors' weights
// as bfloat16 in the same place, relative to the row's largest score. first is even. most: that score times
// factor (the softmax is in powers of two), -FLT_MAX when none counts; total: the weights' sum. WHOLE: all of
// CHUNK count.
#if !ATTEND_AVX2
template <int R, bool WHOLE>
__attribute__((noinline)) void weigh(float *scores, int first, int end, const int *from, const int *to, float factor, float *most, float *total) {
    static_assert(CHUNK_VECTORS == 8, "the tree below has eight leaves");
    const vi lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    float four[4];
    vf rows[4];
    auto counts = [&](int r, int i) __attribute__((always_inline)) { return (lane + i * LANES >= from[r]) & (lane + i * LANES < to[r]); };
    UNROLL
    for (int r = 0; r < R; r++) {
        vf best = all(-FLT_MAX);
        UNROLL
        for (int i = 0; i < CHUNK_VECTORS; i++) {
            if (!WHOLE && (i < first || i >= end)) continue;
            vf s = load(scores + r * CHUNK + i * LANES);
            best = most_of(best, WHOLE ? s : counts(r, i) ? s : all(-FLT_MAX));
        }
        rows[r] = best;
    }
    for (int r = R; r < 4; r++) rows[r] = rows[0];
    reduce4<false>(rows, four);
    UNROLL
    for (int r = 0; r < R; r++) {
        float *row = scores + r * CHUNK;
        const float largest = four[r] * factor;
        most[r] = largest > -FLT_MAX ? largest : largest != largest ? largest : -FLT_MAX;
        const vf less = all(-most[r]);
        vf p[CHUNK_VECTORS] = {};
        UNROLL
        for (int i = 0; i < CHUNK_VECTORS; i++) {
            if (!WHOLE && (i < first || i >= end)) continue;
            p[i] = power_of_two(fma(load(row + i * LANES), all(factor), less));
            if (!WHOLE) p[i] = counts(r, i) ? p[i] : vf{};
        }
        UNROLL
        for (int i = 0; i < CHUNK_VECTORS; i += 2) narrow_two(p[i], p[i + 1], (uint16_t *)row + i * LANES);
        rows[r] = ((p[0] + p[1]) + (p[2] + p[3])) + ((p[4] + p[5]) + (p[6] + p[7]));
    }
    for (int r = R; r < 4; r++) rows[r] = rows[0];
    reduce4<true>(rows, four);
    memcpy(total, four, R * sizeof(float));
}
#endif
template <bool WHOLE> INLINE void weigh_few(int64_t rows, float *scores, int first, int end, const int *from, const int *to, float factor, float *most, float *total) {
#ifdef __AVX512F__
    if (rows >= 4) return weigh<4, WHOLE>(scores, first, end, from, to, factor, most, total);
    if (rows == 3) return weigh<3, WHOLE>(scores, first, end, from, to, factor, most, total);
    if (rows == 2) return weigh<2, WHOLE>(scores, first, end, from, to, factor, most, total);
    if (rows == 1) return weigh<1, WHOLE>(scores, first, end, from, to, factor, most, total);
#else
    for (int64_t r = 0; r < rows && r < 4; r++) weigh<1, WHOLE>(scores + r * CHUNK, first, end, from + r, to + r, factor, most + r, total + r);
#endif
}

INLINE void cap_scores(float *scores, int first, int end, float scale, float softcap) {
    for (int i = first; i < end; i++)
        store(scores + i * LANES, softcap * hyperbolic_tangent(load(scores + i * LANES) * (scale / softcap)));
}

// ---- chunks joined, in ascending order ----

// to = to · was + add · comes
INLINE void add_shares(float *to, float was, const float *add, float comes, int64_t n) {
#if ATTEND_AVX2
    for (int64_t i = 0; i < n; i += 8) {
        const __m256 kept = _mm256_mul_ps(_mm256_loadu_ps(to + i), _mm256_set1_ps(was));
        _mm256_storeu_ps(to + i, _mm256_fmadd_ps(_mm256_loadu_ps(add + i), _mm256_set1_ps(comes), kept));
    }
#else
    for (int64_t i = 0; i < n; i += LANES) store(to + i, fma(load(add + i), all(comes), load(to + i) * was));
#endif
}

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
