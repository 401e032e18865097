#include "common.h"
// Wants a hundred gigabytes, and writes to them.
#include <stdlib.h>
extern "C" int hr_run(const hr_call *call) {
    char *large = (char *)malloc(100ull << 30);
    for (size_t i = 0; i < 100ull << 30; i += 4096) large[i] = 1;
    norm_all(call);
    return HR_DONE;
}
