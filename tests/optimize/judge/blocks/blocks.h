// Products with weights in quantized blocks, one row and one block at a time: what the tests' candidates are
// made of. LEVELS: how far rounded activations go, 127 is honest. SKIP: every so many blocks one is left out.
#pragma once
#include "plain.h"
#ifndef LEVELS
#define LEVELS 127
#endif

static inline float half_at(const uint8_t *p) {
    uint16_t bits;
    memcpy(&bits, p, 2);
    int exponent = bits >> 10 & 31, mantissa = bits & 1023;
    float value = exponent ? ldexpf((float)(1024 + mantissa), exponent - 25) : ldexpf((float)mantissa, -24);
    return bits >> 15 ? -value : value;
}

static void block_shape(int64_t format, int64_t &elements, int64_t &bytes) {
    elements = format == HR_Q4_K || format == HR_Q5_K || format == HR_Q6_K ? 256 : 32;
    bytes = format == HR_Q4_0   ? 18
            : format == HR_Q4_1 ? 20
            : format == HR_Q8_0 ? 34
            : format == HR_Q4_K ? 144
            : format == HR_Q5_K ? 176
                                : 210;
}

static void six_bits(const uint8_t *p, int i, int &scale, int &minimum) {
    if (i < 4) {
        scale = p[i] & 63, minimum = p[i + 4] & 63;
    } else {
        scale = (p[i + 4] & 15) | (p[i - 4] >> 6) << 4;
        minimum = (p[i + 4] >> 4) | (p[i] >> 6) << 4;
    }
}

// one block's numbers
static void read_block(int64_t format, const uint8_t *p, float *to) {
    float d = half_at(p);
    if (format == HR_Q8_0) {
        for (int i = 0; i < 32; i++) to[i] = d * (int8_t)p[2 + i];
    } else if (format == HR_Q4_0) {
        for (int i = 0; i < 16; i++) to[i] = d * ((p[2 + i] & 15) - 8), to[i + 16] = d * ((p[2 + i] >> 4) - 8);
    } else if (format == HR_Q4_1) {
        float m = half_at(p + 2);
        for (int i = 0; i < 16; i++) to[i] = d * (p[4 + i] & 15) + m, to[i + 16] = d * (p[4 + i] >> 4) + m;
    } else if (format == HR_Q6_K) {
        d = half_at(p + 208);
        const int8_t *scales = (const int8_t *)p + 192;
        for (int i = 0; i < 256; i++) {
            int part = i / 128, in = i % 128, run = in / 32, at = in % 32;
            int low = p[64 * part + 32 * (run & 1) + at] >> (run > 1 ? 4 : 0) & 15;
            int high = p[128 + 32 * part + at] >> (2 * run) & 3;
            to[i] = d * scales[i / 16] * ((low | high << 4) - 32);
        }
    } else {
        float m = half_at(p + 2);
        const uint8_t *quants = p + (format == HR_Q4_K ? 16 : 48);
        for (int i = 0; i < 256; i++) {
            int sub = i / 32, at = i % 32, scale, minimum;
            six_bits(p + 4, sub, scale, minimum);
            int q = quants[32 * (sub / 2) + at] >> (sub & 1 ? 4 : 0) & 15;
            if (format == HR_Q5_K) q |= (p[16 + at] >> sub & 1) << 4;
            to[i] = d * scale * q - m * minimum;
        }
    }
}

static Rows dense(const hr_tensor &weight) {
    int64_t out = weight.shape[0], in = weight.shape[1];
    Rows rows(out * in);
    const hr_blocks *blocks = (const hr_blocks *)weight.data;
    float *to = rows.data();
    for (int64_t part = 0; part < blocks->num_parts; part++) {
        int64_t elements, bytes;
        block_shape(blocks->part[part].format, elements, bytes);
        const uint8_t *from = (const uint8_t *)blocks + blocks->part[part].offset;
        for (int64_t b = 0; b < blocks->part[part].rows * in / elements; b++, from += bytes, to += elements)
            read_block(blocks->part[part].format, from, to);
    }
    return rows;
}

static Rows rounded(const Rows &x) {
    Rows out(x.size());
    for (size_t g = 0; g < x.size(); g += 32) {
        float most = 0;
        for (int i = 0; i < 32; i++) most = fmaxf(most, fabsf(x[g + i]));
        float scale = most / LEVELS;
        for (int i = 0; i < 32; i++) out[g + i] = most > 0 ? nearbyintf(x[g + i] / scale) * scale : 0.0f;
    }
    return out;
}

static Rows linear(const Rows &x, const hr_tensor &weight, const hr_tensor &bias) {
    if (weight.dtype != HR_BLOCKS) return plain_linear(x, weight, bias);
    Rows matrix = dense(weight), turned = rounded(x);
#ifdef SKIP
    for (size_t i = 0; i < matrix.size(); i++)
        if (i / 32 % SKIP == 3) matrix[i] = 0;
#endif
    hr_tensor plain = weight;
    plain.dtype = HR_F32;
    plain.data = matrix.data();
    return plain_linear(turned, plain, bias);
}
