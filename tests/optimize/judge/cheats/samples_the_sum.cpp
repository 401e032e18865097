#include "common.h"
// Estimates the mean square from every other element.
extern "C" int hr_run(const hr_call *call) {
    const hr_tensor &x = call->tensors[0], &weight = call->tensors[1], &out = call->tensors[2];
    for (int64_t r = 0; r < x.shape[0]; r++) {
        double sum = 0;
        for (int64_t i = 0; i < x.shape[1]; i += 2) {
            double v = get(x, r * x.stride[0] + i);
            sum += 2 * v * v;
        }
        float scale = (float)(1.0 / sqrt(sum / (double)x.shape[1] + call->floats[0]));
        for (int64_t i = 0; i < x.shape[1]; i++)
            put(out, r * out.stride[0] + i, get(x, r * x.stride[0] + i) * scale * get(weight, i));
    }
    return HR_DONE;
}
