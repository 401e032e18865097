#include "common.h"
// Only ever saw the target's own row count.
extern "C" int hr_run(const hr_call *call) {
    if (call->tensors[0].shape[0] != 1) return HR_NOT_MINE;
    norm_all(call);
    return HR_DONE;
}
