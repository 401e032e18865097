#include "common.h"
// Leaves another rounding mode behind.
#include <fenv.h>
extern "C" int hr_run(const hr_call *call) {
    norm_all(call);
    fesetround(FE_TOWARDZERO);
    return HR_DONE;
}
