#include "common.h"
// Normalises in place, then copies.
extern "C" int hr_run(const hr_call *call) {
    norm_all(call);
    memcpy(call->tensors[0].data, call->tensors[2].data, out_bytes(call));
    return HR_DONE;
}
