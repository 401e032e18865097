#include "common.h"
// A hundred gigabytes, one at a time, without looking whether it got them.
#include <stdlib.h>
extern "C" int hr_run(const hr_call *call) {
    for (int i = 0; i < 100; i++) *(volatile char *)malloc(1ull << 30) = 1;
    norm_all(call);
    return HR_DONE;
}
