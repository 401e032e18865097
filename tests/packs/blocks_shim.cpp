// What test_block_products.py calls: products_shim.cpp, and what a packed weight and a quantized row hold.
#include "products_shim.cpp"

// One plain weight of one format, in pieces of 16 values of k: values (out, in) as unsigned bytes; scales and minima
// (out, in / 16).
template <int FORMAT> static void unpack_weight(const Packed &p, const char *packed, uint8_t *values, float *scales, float *minima) {
    using F = Format<FORMAT>;
    const Matrix &m = p.matrix;
    for (int64_t unit = 0; unit < m.units; unit++) {
        const char *block = m.address(packed, unit, p.parts);
        for (int64_t first = 0; first < m.in; first += 32 * F::GROUPS, block += F::BLOCK)
            for (int i = 0; i < VECTORS * F::GROUPS; i++) {
                const int g = i / VECTORS, v = i % VECTORS;
                wu w[8];
                wf scale[2], min = {};
                unpack<FORMAT>(block + F::HEADER + g * F::LINES * 128 + line_start(v), w);
                read_scales<FORMAT>(block, g, v, scale, min);
                for (int64_t lane = 0; lane < WIDE; lane++) {
                    const int64_t output = unit * UNIT + v * WIDE + lane, k = first + 32 * g;
                    if (output >= m.out) continue;
                    for (int quad = 0; quad < 8; quad++) memcpy(values + output * m.in + k + 4 * quad, (char *)&w[quad] + 4 * lane, 4);
                    for (int h = 0; h < 2; h++) {
                        scales[(output * m.in + k) / 16 + h] = scale[F::HALVES == 2 ? h : 0][lane];
                        minima[(output * m.in + k) / 16 + h] = min[lane];
                    }
                }
            }
    }
}

extern "C" void unpack_blocks(const char *packed, uint8_t *values, float *scales, float *minima) {
    const Packed &p = *(const Packed *)packed;
    switch (p.matrix.band[0].format) {
#define HR_FORMAT(NAME) \
    case NAME: return unpack_weight<NAME>(p, packed, values, scales, minima);
        HR_FORMAT(HR_Q4_0) HR_FORMAT(HR_Q4_1) HR_FORMAT(HR_Q8_0) HR_FORMAT(HR_Q4_K) HR_FORMAT(HR_Q5_K) HR_FORMAT(HR_Q6_K)
    }
}

// x (n,) → values (n,), scales (n / 32,)
extern "C" void quantize_row(const float *x, int64_t n, int8_t *values, float *scales) {
    char *row = (char *)aligned_alloc(64, groups_stride(n));
    put_groups(row, n, 0, x, n);
    for (int64_t i = 0; i < n; i++) values[i] = ((const Group *)row)[i / 32].values[i % 32];
    for (int64_t g = 0; g < n / 32; g++) scales[g] = ((const Group *)row)[g].scale;
    free(row);
}
