#include "plain.h"
enum { X, COS, SIN };

extern "C" int hr_run(const hr_call *call) {
    const hr_tensor *t = call->tensors, &x = t[X];
    Rows rows = read_rows(x);
    for (int64_t r = 0; r < x.shape[0]; r++)
        for (int64_t h = 0; h < x.shape[1]; h++) {
            float *head = &rows[(r * x.shape[1] + h) * x.shape[2]];
            rope(head, t[COS], t[SIN], r);
            for (int64_t i = 0; i < x.shape[2]; i++) put(x, r * x.stride[0] + h * x.stride[1] + i, head[i]);
        }
    return HR_DONE;
}
