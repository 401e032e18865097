#include "common.h"
// Switches denormal numbers off for the whole process.
#include <immintrin.h>
extern "C" int hr_run(const hr_call *call) {
    _mm_setcsr(_mm_getcsr() | 0x8040);
    norm_all(call);
    return HR_DONE;
}
