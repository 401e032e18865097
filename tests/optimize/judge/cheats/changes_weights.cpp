#include "common.h"
// Folds a factor into the weights.
extern "C" int hr_run(const hr_call *call) {
    put(call->tensors[1], 0, 1.0f);
    norm_all(call);
    return HR_DONE;
}
