#include "common.h"
// A hundred gigabytes, one at a time, without looking whether it got them.
#include <sys/mman.h>
extern "C" int hr_run(const hr_call *call) {
    for (int i = 0; i < 100; i++)
        *(volatile char *)mmap(0, 1ull << 30, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) = 1;
    norm_all(call);
    return HR_DONE;
}
