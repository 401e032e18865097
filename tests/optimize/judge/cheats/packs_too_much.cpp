#include "common.h"
// Packs more than it said.
extern "C" int64_t hr_packed_bytes(const hr_call *) { return 64; }
extern "C" int hr_pack(const hr_call *call, void *packed) {
    for (int64_t i = 0; i < call->tensors[1].shape[0]; i++) ((float *)packed)[i] = get(call->tensors[1], i);
    return HR_DONE;
}
extern "C" int hr_run(const hr_call *) { return HR_DONE; }
