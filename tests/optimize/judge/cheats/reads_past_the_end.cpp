#include "common.h"
// Reads a page beyond its input; the result does not depend on it.
static volatile float sink;
extern "C" int hr_run(const hr_call *call) {
    const hr_tensor &x = call->tensors[0];
    sink = ((const float *)x.data)[x.shape[0] * x.shape[1] + 64];
    norm_all(call);
    return HR_DONE;
}
