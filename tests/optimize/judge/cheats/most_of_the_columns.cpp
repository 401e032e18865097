#include "common.h"
// Leaves the last columns.
extern "C" int hr_run(const hr_call *call) {
    norm(call, 0, call->tensors[0].shape[0], call->tensors[0].shape[1] - 8);
    return HR_DONE;
}
