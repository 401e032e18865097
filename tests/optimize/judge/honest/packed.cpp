#include "common.h"
// Keeps its weights as float32.
extern "C" int64_t hr_packed_bytes(const hr_call *call) { return 4 * call->tensors[1].shape[0]; }
extern "C" int hr_pack(const hr_call *call, void *packed) {
    for (int64_t i = 0; i < call->tensors[1].shape[0]; i++) ((float *)packed)[i] = get(call->tensors[1], i);
    return HR_DONE;
}
extern "C" int hr_run(const hr_call *call) {
    hr_tensor tensors[3] = {call->tensors[0], call->tensors[0], call->tensors[2]};
    int64_t size = call->tensors[0].shape[1];
    tensors[1] = {const_cast<void *>(call->packed), HR_F32, 1, {size}, {1}};
    hr_call own = *call;
    own.tensors = tensors;
    norm_all(&own);
    return HR_DONE;
}
