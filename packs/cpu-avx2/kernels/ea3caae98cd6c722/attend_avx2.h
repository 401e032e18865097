// The parts of attend_tile.h that take the time, in registers of 8: what a compiler makes of vectors of 16 there
// lies in memory.
#pragma once

namespace {

template <int R, int N>
__attribute__((noinline)) void multiply_tile(const uint32_t *a, int64_t a_stride, const uint32_t *b, int64_t pairs, float *c, int64_t c_stride) {
    static_assert(N == 1, "two registers are one vector here");
    const __m256i odd = _mm256_set1_epi32((int)0xffff0000u);
    __m256 sums[R][2] = {};
    for (int64_t pair = 0; pair < pairs; pair++) {
        const __m256i b0 = _mm256_loadu_si256((const __m256i *)(b + pair * PANEL)), b1 = _mm256_loadu_si256((const __m256i *)(b + pair * PANEL) + 1);
        const __m256 even0 = (__m256)_mm256_slli_epi32(b0, 16), even1 = (__m256)_mm256_slli_epi32(b1, 16);
        const __m256 odd0 = (__m256)_mm256_and_si256(b0, odd), odd1 = (__m256)_mm256_and_si256(b1, odd);
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
            const __m256i both = _mm256_set1_epi32((int)a[r * a_stride + pair]);
            const __m256 x = (__m256)_mm256_slli_epi32(both, 16), y = (__m256)_mm256_and_si256(both, odd);
            sums[r][0] = _mm256_fmadd_ps(y, odd0, _mm256_fmadd_ps(x, even0, sums[r][0]));
            sums[r][1] = _mm256_fmadd_ps(y, odd1, _mm256_fmadd_ps(x, even1, sums[r][1]));
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) _mm256_storeu_ps(c + r * c_stride, sums[r][0]), _mm256_storeu_ps(c + r * c_stride + 8, sums[r][1]);
}

// 8 × 8 words
INLINE void transpose(__m256i *r) {
    __m256i t[8];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) t[2 * i] = _mm256_unpacklo_epi32(r[2 * i], r[2 * i + 1]), t[2 * i + 1] = _mm256_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++)
#pragma GCC unroll 2
        for (int j = 0; j < 2; j++) {
            r[4 * i + 2 * j] = _mm256_unpacklo_epi64(t[4 * i + j], t[4 * i + 2 + j]);
            r[4 * i + 2 * j + 1] = _mm256_unpackhi_epi64(t[4 * i + j], t[4 * i + 2 + j]);
        }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) t[i] = _mm256_permute2x128_si256(r[i], r[4 + i], 0x20), t[4 + i] = _mm256_permute2x128_si256(r[i], r[4 + i], 0x31);
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) r[i] = t[i];
}

// 16 rows of 16 words → columns PANEL apart
INLINE void turn_line(const uint16_t *const *rows, uint32_t *columns) {
    for (int quarter = 0; quarter < 4; quarter++) {
        const int half = quarter / 2 * 8, word = quarter % 2 * 8;
        __m256i block[8];
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) block[i] = _mm256_loadu_si256((const __m256i *)(rows[half + i] + 2 * word));
        transpose(block);
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) _mm256_storeu_si256((__m256i *)(columns + (word + i) * PANEL + half), block[i]);
    }
}

// 32 dimensions of two values, in pair_up's order
INLINE void pair_line(const uint16_t *first, const uint16_t *second, uint32_t *to) {
    for (int i = 0; i < 2; i++) {
        const __m256i a = _mm256_loadu_si256((const __m256i *)first + i), b = _mm256_loadu_si256((const __m256i *)second + i);
        _mm256_storeu_si256((__m256i *)to + i, _mm256_unpacklo_epi16(a, b));
        _mm256_storeu_si256((__m256i *)to + 2 + i, _mm256_unpackhi_epi16(a, b));
    }
}

INLINE __m256 power_of_two8(__m256 x) {
    x = _mm256_max_ps(_mm256_set1_ps(-126.0f), x);  // in this order a NaN stays one
    const __m256 n = _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), r = _mm256_sub_ps(x, n);
    __m256 p = _mm256_set1_ps(1.33335581e-3f);
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(9.61812911e-3f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(5.55041087e-2f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(0.240226507f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(0.693147181f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f));
    const __m256i power = _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23);
    return _mm256_blendv_ps((__m256)_mm256_add_epi32((__m256i)p, power), x, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
}

// float32 → bfloat16 in the low halves of words, to nearest, ties to even
INLINE __m256i narrow8(__m256 x) {
    const __m256i u = (__m256i)x, odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x7fff)), odd), 16);
    const __m256i nan = (__m256i)_mm256_cmp_ps(x, x, _CMP_UNORD_Q);
    return _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), nan);
}

// As attend_tile.h's, one row at a time.
template <int R, bool WHOLE>
__attribute__((noinline)) void weigh(float *scores, int first, int end, const int *from, const int *to, float factor, float *most, float *total) {
    static_assert(R == 1, "one row");
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i low = _mm256_set1_epi32(*from - 1), high = _mm256_set1_epi32(*to);
    auto counts = [&](int i) __attribute__((always_inline)) {
        const __m256i key = _mm256_add_epi32(lane, _mm256_set1_epi32(i));
        return (__m256)_mm256_and_si256(_mm256_cmpgt_epi32(key, low), _mm256_cmpgt_epi32(high, key));
    };
    const __m256 least = _mm256_set1_ps(-FLT_MAX);
    const int begin = WHOLE ? 0 : first * LANES, stop = WHOLE ? CHUNK : end * LANES;
    __m256 best = least;
    for (int i = begin; i < stop; i += 8) {
        __m256 s = _mm256_loadu_ps(scores + i);
        if (!WHOLE) s = _mm256_blendv_ps(least, s, counts(i));
        best = _mm256_max_ps(best, s);
    }
    float lanes[8], largest = -FLT_MAX;
    _mm256_storeu_ps(lanes, best);
    for (float one : lanes) largest = one > largest ? one : largest;
    largest *= factor;
    *most = largest > -FLT_MAX ? largest : -FLT_MAX;
    const __m256 less = _mm256_set1_ps(-*most), by = _mm256_set1_ps(factor);
    __m256 sums = _mm256_setzero_ps();
    for (int i = begin; i < stop; i += 16) {
        __m256 p[2];
        for (int j = 0; j < 2; j++) {
            p[j] = power_of_two8(_mm256_fmadd_ps(_mm256_loadu_ps(scores + i + 8 * j), by, less));
            if (!WHOLE) p[j] = _mm256_and_ps(p[j], counts(i + 8 * j));
            sums = _mm256_add_ps(sums, p[j]);
        }
        const __m256i both = _mm256_permute4x64_epi64(_mm256_packus_epi32(narrow8(p[0]), narrow8(p[1])), 0xd8);
        _mm256_storeu_si256((__m256i *)((uint16_t *)scores + i), both);
    }
    _mm256_storeu_ps(lanes, sums);
    *total = ((lanes[0] + lanes[4]) + (lanes[2] + lanes[6])) + ((lanes[1] + lanes[5]) + (lanes[3] + lanes[7]));
}

}  // namespace
