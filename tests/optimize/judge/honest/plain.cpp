#include "common.h"
extern "C" int hr_run(const hr_call *call) {
    norm_all(call);
    return HR_DONE;
}
