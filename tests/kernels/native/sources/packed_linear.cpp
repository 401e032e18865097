// A linear that reads its weight transposed, as float32, and its bias behind it. It declines wide weights.
#include "plain.h"
enum { X, WEIGHT, BIAS, RESIDUAL, OUT };

struct Header {
    int64_t in, out;
};

extern "C" int64_t hr_packed_bytes(const hr_call *call) {
    const hr_tensor &weight = call->tensors[WEIGHT];
    if (weight.shape[1] > 64) return 0;
    return sizeof(Header) + 4 * weight.shape[0] * (weight.shape[1] + 1);
}

extern "C" int hr_pack(const hr_call *call, void *packed) {
    const hr_tensor &weight = call->tensors[WEIGHT], &bias = call->tensors[BIAS];
    if ((uintptr_t)packed % 64) return 2;
    Header *header = (Header *)packed;
    *header = {weight.shape[1], weight.shape[0]};
    float *to = (float *)(header + 1);
    for (int64_t i = 0; i < header->in; i++)
        for (int64_t o = 0; o < header->out; o++) *to++ = get(weight, o * header->in + i);
    for (int64_t o = 0; o < header->out; o++) *to++ = bias.data ? get(bias, o) : 0;
    return HR_DONE;
}

extern "C" int hr_run(const hr_call *call) {
    const hr_tensor *t = call->tensors;
    if (t[WEIGHT].data || t[BIAS].data || !call->packed) return 3;
    const Header *header = (const Header *)call->packed;
    const float *weight = (const float *)(header + 1), *bias = weight + header->in * header->out;
    for (int64_t r = 0; r < t[X].shape[0]; r++)
        for (int64_t o = 0; o < header->out; o++) {
            double sum = bias[o] + (t[RESIDUAL].data ? get(t[RESIDUAL], r * header->out + o) : 0.0);
            for (int64_t i = 0; i < header->in; i++)
                sum += (double)get(t[X], r * header->in + i) * weight[i * header->out + o];
            put(t[OUT], r * header->out + o, (float)sum);
        }
    return HR_DONE;
}
