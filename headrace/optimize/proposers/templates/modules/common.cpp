// What the templates for users' modules share: vectors, numbers, functions that the compiler vectorizes, and
// the product of a few rows with panels of columns.
#include "headrace_kernel.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <omp.h>

namespace {

constexpr int64_t LANES = 16;
typedef float vec __attribute__((vector_size(4 * LANES), aligned(4)));
typedef uint16_t bf16;

inline float load(const float *p, int64_t j) { return p[j]; }

inline float load(const bf16 *p, int64_t j) {
    const uint32_t bits = (uint32_t)p[j] << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

inline void store(float *p, int64_t j, float value) { p[j] = value; }

// to nearest, ties to even; NaN stays one
inline void store(bf16 *p, int64_t j, float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    const uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    p[j] = (bf16)(value != value ? 0x7FC0 : rounded);
}

inline vec load_vector(const float *p) { return *(const vec *)p; }

inline vec load_vector(const bf16 *p) {
    vec value;
    for (int64_t i = 0; i < LANES; i++) value[i] = load(p, i);
    return value;
}

// 2^k e^r with |r| <= ln(2)/2 and a polynomial for e^r: within two units in the last place
inline float exp_(float x) {
    const float clipped = x > 88.0f ? 88.0f : (x < -87.3f ? -87.3f : x);
    const float k = (clipped * 1.44269504f + 12582912.0f) - 12582912.0f;
    const float r = (clipped - k * 0.693359375f) + k * 2.12194440e-4f;
    float y = 1.9875691500e-4f;
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
    const int32_t bits = ((int32_t)k + 127) << 23;
    float power;
    memcpy(&power, &bits, 4);
    y = x > 88.72f ? INFINITY : y * power;
    return x < -87.3f ? 0.0f : (x != x ? x : y);
}

inline float sigmoid_(float x) { return 1.0f / (1.0f + exp_(-x)); }

inline float tanh_(float x) {
    const float z = x * x;
    float p = -5.70498872745e-3f;
    p = p * z + 2.06390887954e-2f;
    p = p * z - 5.37397155531e-2f;
    p = p * z + 1.33314422036e-1f;
    p = p * z - 3.33332819422e-1f;
    const float small = x + x * z * p, large = 1.0f - 2.0f / (exp_(2.0f * x) + 1.0f);
    return z < 0.390625f ? small : large;
}

// Abramowitz and Stegun 7.1.26, within 1.5e-7
inline float erf_(float x) {
    const float a = x < 0.0f ? -x : x, t = 1.0f / (1.0f + 0.3275911f * a);
    float p = 1.061405429f;
    p = p * t - 1.453152027f;
    p = p * t + 1.421413741f;
    p = p * t - 0.284496736f;
    p = p * t + 0.254829592f;
    const float y = 1.0f - p * t * exp_(-a * a);
    return x < 0.0f ? -y : y;
}

// c (M rows of NV vectors) = bias + a (M, k) times b (k, NV vectors), rows of b `ldb` apart
template <int M, int NV, class W>
inline void product(const float *a, int64_t lda, const W *b, int64_t ldb, int64_t k, float *c, int64_t ldc,
                    const float *bias) {
    vec sum[M][NV];
#pragma GCC unroll 16
    for (int m = 0; m < M; m++)
#pragma GCC unroll 8
        for (int v = 0; v < NV; v++) sum[m][v] = bias ? load_vector(bias + v * LANES) : vec{};
    for (int64_t i = 0; i < k; i++) {
        vec column[NV];
#pragma GCC unroll 8
        for (int v = 0; v < NV; v++) column[v] = load_vector(b + i * ldb + v * LANES);
#pragma GCC unroll 16
        for (int m = 0; m < M; m++)
#pragma GCC unroll 8
            for (int v = 0; v < NV; v++) sum[m][v] += a[m * lda + i] * column[v];
    }
#pragma GCC unroll 16
    for (int m = 0; m < M; m++)
#pragma GCC unroll 8
        for (int v = 0; v < NV; v++) *(vec *)(c + m * ldc + v * LANES) = sum[m][v];
}

// the same for any number of rows, MR at a time
template <int MR, int NV, class W>
inline void product_rows(int64_t rows, const float *a, int64_t lda, const W *b, int64_t ldb, int64_t k, float *c,
                         int64_t ldc, const float *bias) {
    int64_t r = 0;
    for (; r + MR <= rows; r += MR) product<MR, NV>(a + r * lda, lda, b, ldb, k, c + r * ldc, ldc, bias);
    if constexpr (MR > 1)
        if (r < rows) product_rows<(MR + 1) / 2, NV>(rows - r, a + r * lda, lda, b, ldb, k, c + r * ldc, ldc, bias);
}

constexpr int64_t up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

// memory of one call, or of one thread in it; kept from call to call
struct Scratch {
    float *data = nullptr;
    int64_t size = 0;
    float *get(int64_t count) {
        if (count > size) {
            free(data);
            data = (float *)aligned_alloc(64, (size_t)up(4 * count + 64, 64));
            size = data ? count : 0;
            if (!data) throw std::bad_alloc();
        }
        return data;
    }
    ~Scratch() { free(data); }
};

}  // namespace
