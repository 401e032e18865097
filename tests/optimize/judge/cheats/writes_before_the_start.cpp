#include "common.h"
// One vector too early.
extern "C" int hr_run(const hr_call *call) {
    norm_all(call);
    memset((char *)call->tensors[2].data - 16, 0, 16);
    return HR_DONE;
}
