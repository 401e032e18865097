#include "common.h"
// One vector too many.
extern "C" int hr_run(const hr_call *call) {
    norm_all(call);
    memset((char *)call->tensors[2].data + out_bytes(call), 0, 64);
    return HR_DONE;
}
