#include "common.h"
// Talks without end.
#include <stdio.h>
extern "C" int hr_run(const hr_call *call) {
    for (int i = 0; i < 100000; i++) puts("the quick brown fox jumps over the lazy dog, again and again");
    fflush(stdout);
    norm_all(call);
    return HR_DONE;
}
