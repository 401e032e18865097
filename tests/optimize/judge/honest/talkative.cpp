#include "common.h"
// Says a few words, once.
#include <stdio.h>
extern "C" int hr_run(const hr_call *call) {
    static int calls;
    if (calls++ == 0) fprintf(stderr, "rms_norm: %ld columns\n", (long)call->tensors[0].shape[1]);
    norm_all(call);
    return HR_DONE;
}
