// Scores of few query vectors on 32 keys as packs/cpu adds them, to the bit: pairs of dimensions ascending, one chain an
// output. Keys are turned in registers and used there; packs/cpu leaves them in memory and reads them again.
#pragma once
#include "attend_tile.h"

namespace {

// keys [at, at + 32) for R query vectors
template <int R>
__attribute__((noinline)) void score_pair(const uint32_t *q, int64_t stride, const Addresses &where, const Addresses &next, int at, int64_t dim, float *scores) {
    const int64_t lines = half_lines(dim);
    const Addresses *more = beyond;
    vf sum[R][2] = {};
    for (int64_t line = 0; line < lines; line++) {
        alignas(64) __m512i first[LANES];
        __m512i block[LANES];
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) {
            fetch(next.keys[at + i] + line * 32), fetch(next.keys[at + LANES + i] + line * 32);
            if (more) fetch(more->keys[at + i] + line * 32), fetch(more->keys[at + LANES + i] + line * 32);
            block[i] = (__m512i)load_pairs(where.keys[at + i], line * 32, dim);
        }
        transpose(block);
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) first[i] = block[i];
        asm volatile("" ::: "memory");  // or the second sixteen's loads push the first out of registers twice
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) block[i] = (__m512i)load_pairs(where.keys[at + LANES + i], line * 32, dim);
        transpose(block);
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++)
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) {
                const vu one = q[r * stride + line * LANES + i] - vu{};
                add_dot(sum[r][0], (vu)first[i], one), add_dot(sum[r][1], (vu)block[i], one);
            }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) store(scores + r * CHUNK + at, sum[r][0]), store(scores + r * CHUNK + at + LANES, sum[r][1]);
}

INLINE void score_turned(int64_t rows, const uint32_t *q, int64_t stride, const Addresses &where, const Addresses &next, int at, int64_t dim, float *scores) {
    for (int64_t r = 0; r < rows; r += 3) {
        const uint32_t *from = q + r * stride;
        float *to = scores + r * CHUNK;
        if (rows - r >= 3) score_pair<3>(from, stride, where, next, at, dim, to);
        else if (rows - r == 2) score_pair<2>(from, stride, where, next, at, dim, to);
        else score_pair<1>(from, stride, where, next, at, dim, to);
    }
}

}  // namespace
