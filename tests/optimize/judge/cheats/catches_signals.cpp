#include "common.h"
// Wants to survive its own faults.
#include <signal.h>
extern "C" int hr_run(const hr_call *call) {
    signal(SIGSEGV, SIG_IGN);
    norm_all(call);
    return HR_DONE;
}
