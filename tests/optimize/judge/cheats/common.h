// Shared by the candidates of these tests: an honest rms_norm, to be wrong in one way each.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>
#include "headrace_kernel.h"

static inline float get(const hr_tensor &t, int64_t i) {
    if (t.dtype == HR_F32) return ((const float *)t.data)[i];
    uint32_t bits = (uint32_t)((const uint16_t *)t.data)[i] << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static inline void put(const hr_tensor &t, int64_t i, float value) {
    if (t.dtype == HR_F32) {
        ((float *)t.data)[i] = value;
        return;
    }
    uint32_t bits;
    memcpy(&bits, &value, 4);
    bits += 0x7fff + (bits >> 16 & 1);
    ((uint16_t *)t.data)[i] = (uint16_t)(bits >> 16);
}

// Rows [from, to) and columns below `width` of a call.
static inline void norm(const hr_call *call, int64_t from, int64_t to, int64_t width) {
    const hr_tensor &x = call->tensors[0], &weight = call->tensors[1], &out = call->tensors[2];
    int64_t size = x.shape[1];
    for (int64_t r = from; r < to; r++) {
        double sum = 0;
        for (int64_t i = 0; i < size; i++) {
            double v = get(x, r * x.stride[0] + i);
            sum += v * v;
        }
        float scale = (float)(1.0 / sqrt(sum / (double)size + call->floats[0]));
        for (int64_t i = 0; i < width; i++)
            put(out, r * out.stride[0] + i,
                get(x, r * x.stride[0] + i) * scale * (get(weight, i) + (float)call->floats[1]));
    }
}

static inline void norm_all(const hr_call *call) {
    norm(call, 0, call->tensors[0].shape[0], call->tensors[0].shape[1]);
}

static inline size_t out_bytes(const hr_call *call) {
    const hr_tensor &out = call->tensors[2];
    return (size_t)(out.shape[0] * out.shape[1]) * (out.dtype == HR_F32 ? 4 : 2);
}
