#include "common.h"
// Writes until the disk is full.
#include <stdio.h>
extern "C" int hr_run(const hr_call *call) {
    static char block[1 << 20];
    FILE *file = fopen("/tmp/large", "w");
    while (file && fwrite(block, 1, sizeof block, file) == sizeof block) {}
    norm_all(call);
    return HR_DONE;
}
