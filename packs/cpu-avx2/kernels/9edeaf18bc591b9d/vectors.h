// Vectors of 16 floats: AVX-512 where the compiler targets it, else what GCC and clang make of the same code.
//
// Compile with -ffp-contract=off: where a product and a sum become one instruction must be what is written
// here (fma), not what the compiler sees fit in one place and not in another, or a row's bits depend on the
// path it took.
#pragma once
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#ifdef _OPENMP
#include <omp.h>
#endif

#include "headrace_kernel.h"

#define INLINE static inline __attribute__((always_inline))
#define INLINE_MEMBER inline __attribute__((always_inline))

namespace {

constexpr int LANES = 16;
typedef float vf __attribute__((vector_size(64)));
typedef int32_t vi __attribute__((vector_size(64)));
typedef uint32_t vu __attribute__((vector_size(64)));
typedef uint16_t vh __attribute__((vector_size(32)));

INLINE vf fma(vf a, vf b, vf c) {
#ifdef __AVX512F__
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    __m256 x[2], y[2], z[2];
    memcpy(x, &a, 64), memcpy(y, &b, 64), memcpy(z, &c, 64);
    z[0] = _mm256_fmadd_ps(x[0], y[0], z[0]), z[1] = _mm256_fmadd_ps(x[1], y[1], z[1]);
    memcpy(&c, z, 64);
    return c;
#else
    return a * b + c;
#endif
}

INLINE vf all(float x) { return x - vf{}; }
INLINE vf load(const float *p) { vf v; memcpy(&v, p, sizeof v); return v; }
INLINE void store(float *p, vf v) { memcpy(p, &v, sizeof v); }
INLINE vu load_line(const void *p) { vu v; memcpy(&v, p, sizeof v); return v; }

// 16 bfloat16 → float32
INLINE vf widen(vh h) {
#ifdef __AVX512F__
    return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)h), 16);
#else
    return (vf)(__builtin_convertvector(h, vu) << 16);
#endif
}
INLINE vf load_half(const uint16_t *p) { vh h; memcpy(&h, p, sizeof h); return widen(h); }

// the first N of 16, the rest 0; never reads beyond them
template <int N> INLINE vf load_half_part(const uint16_t *p) {
    if constexpr (N == LANES) return load_half(p);
    vh h = {};
    memcpy(&h, p, 2 * N);
    return widen(h);
}

// float32 → bfloat16, to nearest, ties to even; numbers below 2^-126 become 0, as the products take them
INLINE vh narrow(vf x) {
#ifdef __AVX512BF16__
    return (vh)_mm512_cvtneps_pbh((__m512)x);
#else
    vu u = (vu)x;
    vu rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
    vu nan = (vu)(x != x), tiny = (vu)((u & 0x7f800000u) == 0);
    rounded = (rounded & ~nan) | (nan & (u >> 16 | 0x40));
    rounded = (rounded & ~tiny) | (tiny & (u >> 16) & 0x8000u);
#ifdef __AVX512F__
    return (vh)_mm512_cvtepi32_epi16((__m512i)rounded);
#else
    return __builtin_convertvector(rounded, vh);
#endif
#endif
}
INLINE uint16_t narrow1(float x) {
    uint32_t u;
    memcpy(&u, &x, 4);
    if (x != x) return (uint16_t)(u >> 16 | 0x40);
    if (!(u & 0x7f800000u)) return (uint16_t)(u >> 16 & 0x8000u);
    return (uint16_t)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}
INLINE float widen1(uint16_t h) {
    uint32_t u = (uint32_t)h << 16;
    float x;
    memcpy(&x, &u, 4);
    return x;
}

INLINE float sum(vf v) {
    float part[LANES];
    store(part, v);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++) part[i] += part[i + width];
    return part[0];
}

INLINE vf larger(vf a, vf b) { return a > b ? a : b; }
INLINE float largest(vf v) {
    float part[LANES], best;
    store(part, v);
    best = part[0];
    for (int i = 1; i < LANES; i++) best = part[i] > best ? part[i] : best;
    return best;
}

// e^x to about 2 ulp; NaN stays NaN, below -87 it stays at e^-87
INLINE vf exponential(vf x) {
    const vf low = all(-87.0f), high = all(88.0f);
    x = x < low ? low : x;
    x = x > high ? high : x;
    const vf magic = all(12582912.0f);
    vf shifted = fma(x, all(1.44269504f), magic);
    vf n = shifted - magic;
    vf r = fma(n, all(-0.693145752f), x);
    r = fma(n, all(-1.42860677e-6f), r);
    vf p = all(1.0f / 5040);
    p = fma(p, r, all(1.0f / 720));
    p = fma(p, r, all(1.0f / 120));
    p = fma(p, r, all(1.0f / 24));
    p = fma(p, r, all(1.0f / 6));
    p = fma(p, r, all(0.5f));
    p = fma(p, r, all(1.0f));
    p = fma(p, r, all(1.0f));
    vi power = ((vi)shifted - (vi)magic + 127) << 23;
    return p * (vf)power;
}

// near 0, where 1 - 2 / (e^2x + 1) cancels, its series
INLINE vf hyperbolic_tangent(vf x) {
    vf size = x < 0.0f ? -x : x;
    vf bounded = size > 15.0f ? all(15.0f) : size;
    vf wide = 1.0f - 2.0f / (exponential(bounded + bounded) + 1.0f);
    vf s = x * x;
    vf series = all(62.0f / 2835);
    series = fma(series, s, all(-17.0f / 315));
    series = fma(series, s, all(2.0f / 15));
    series = fma(series, s, all(-1.0f / 3));
    vf narrow = fma(series * s, x, x);
    return size < 0.25f ? narrow : (x < 0.0f ? -wide : wide);
}

// 0 silu, 1 gelu (erf), 2 gelu_tanh
INLINE vf activate(vf x, int64_t kind) {
    if (kind == 0) return x / (1.0f + exponential(-x));
    if (kind == 2) {
        vf inner = 0.797884561f * fma(x * x * x, all(0.044715f), x);
        return 0.5f * x * (1.0f + hyperbolic_tangent(inner));
    }
    float part[LANES];
    store(part, x);
    for (int i = 0; i < LANES; i++) part[i] = 0.5f * part[i] * (1.0f + erff(part[i] * 0.707106781f));
    return load(part);
}

// Sixteen vectors → the sixteen sums, one a lane: a tree of the same shape for each.
INLINE vf sums16(vf *t) {
    const vi lo8 = {0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23};
    const vi hi8 = {8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31};
    const vi lo4 = {0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27};
    const vi hi4 = {4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31};
    const vi lo2 = {0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29};
    const vi hi2 = {2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31};
    const vi lo1 = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30};
    const vi hi1 = {1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31};
#define HALVE(a, b, lo, hi) (pick(a, b, lo) + pick(a, b, hi))
    auto pick = [](vf a, vf b, vi which) __attribute__((always_inline)) {
#ifdef __clang__
        vf out;
        for (int i = 0; i < LANES; i++) out[i] = which[i] < LANES ? a[which[i]] : b[which[i] - LANES];
        return out;
#else
        return __builtin_shuffle(a, b, which);
#endif
    };
    vf s8[8], s4[4];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) s8[i] = HALVE(t[2 * i], t[2 * i + 1], lo8, hi8);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) s4[i] = HALVE(s8[2 * i], s8[2 * i + 1], lo4, hi4);
    vf left = HALVE(s4[0], s4[1], lo2, hi2), right = HALVE(s4[2], s4[3], lo2, hi2);
    return HALVE(left, right, lo1, hi1);
#undef HALVE
}

// ---- a call's rows, threads and scratch memory ----

struct Team {
    int id, count;
};

INLINE void barrier() {
#ifdef _OPENMP
#pragma omp barrier
#endif
}

// work(team) on every thread of a team of at most ``threads``
template <class Work> INLINE void run_team(int threads, const Work &work) {
#ifdef _OPENMP
#pragma omp parallel num_threads(threads > 0 ? threads : 1)
    work(Team{omp_get_thread_num(), omp_get_num_threads()});
#else
    work(Team{0, 1});
#endif
}

// Memory of the calling thread that lives until its next call; null when there is none left.
struct Scratch {
    char *memory = nullptr;
    size_t size = 0;
    ~Scratch() { free(memory); }
    char *reserve(size_t bytes) {
        if (bytes > size) {
            free(memory);
            size = (bytes + bytes / 4 + 4095) / 4096 * 4096;
            memory = (char *)aligned_alloc(4096, size);
            if (!memory) size = 0;
        }
        return memory;
    }
};
thread_local Scratch scratch;

// Hands out pieces of one block, each on its own cache line; first run with no memory, to add up sizes.
struct Carver {
    char *memory;
    size_t used = 0;
    template <class T> T *take(size_t count) {
        T *piece = memory ? (T *)(memory + used) : nullptr;
        used += (count * sizeof(T) + 127) / 64 * 64;
        return piece;
    }
};

INLINE int64_t padded(int64_t n) { return (n + LANES - 1) / LANES * LANES; }

// Rows of float32 or bfloat16.
struct Rows {
    char *data;
    int64_t stride;  // elements
    bool half;

    void read(int64_t row, int64_t from, int64_t count, float *to) const {
        if (half) {
            const uint16_t *p = (const uint16_t *)data + row * stride + from;
            int64_t i = 0;
            for (; i + LANES <= count; i += LANES) store(to + i, load_half(p + i));
            for (; i < count; i++) to[i] = widen1(p[i]);
        } else {
            memcpy(to, (const float *)data + row * stride + from, 4 * count);
        }
    }
    void write(int64_t row, int64_t at, int64_t count, const float *from) const {
        if (half) {
            uint16_t *p = (uint16_t *)data + row * stride + at;
            int64_t i = 0;
            for (; i + LANES <= count; i += LANES) {
                vh h = narrow(load(from + i));
                memcpy(p + i, &h, sizeof h);
            }
            for (; i < count; i++) p[i] = narrow1(from[i]);
        } else {
            memcpy((float *)data + row * stride + at, from, 4 * count);
        }
    }
};

INLINE bool is_rows(const hr_tensor &t) {
    return t.data && (t.dtype == HR_F32 || t.dtype == HR_BF16) && t.ndim >= 1 && t.stride[t.ndim - 1] == 1;
}
INLINE Rows rows_of(const hr_tensor &t) { return {(char *)t.data, t.stride[0], t.dtype == HR_BF16}; }

// out = x / sqrt(mean(x²) + eps) * gain; x and out may be the same
INLINE void normalise(const float *x, int64_t n, const float *gain, float eps, float *out) {
    vf squares[4] = {};
    int64_t i = 0;
    for (; i + 4 * LANES <= n; i += 4 * LANES)
        for (int j = 0; j < 4; j++) {
            vf v = load(x + i + j * LANES);
            squares[j] = fma(v, v, squares[j]);
        }
    float tail = 0;
    for (; i < n; i++) tail += x[i] * x[i];
    float total = sum((squares[0] + squares[1]) + (squares[2] + squares[3])) + tail;
    float factor = 1.0f / sqrtf(total / (float)n + eps);
    i = 0;
    for (; i + LANES <= n; i += LANES) store(out + i, load(x + i) * factor * load(gain + i));
    for (; i < n; i++) out[i] = x[i] * factor * gain[i];
}

// A weight vector as float32 plus ``offset``; 0 up to the next multiple of 16.
INLINE void widen_vector(const hr_tensor &t, float offset, float *to) {
    Rows source = {(char *)t.data, 0, t.dtype == HR_BF16};
    int64_t n = t.shape[0];
    source.read(0, 0, n, to);
    for (int64_t i = 0; i < n; i++) to[i] += offset;
    for (int64_t i = n; i < padded(n); i++) to[i] = 0;
}
INLINE bool is_vector(const hr_tensor &t, int64_t n) {
    return is_rows(t) && t.ndim == 1 && t.shape[0] == n;
}

}  // namespace
