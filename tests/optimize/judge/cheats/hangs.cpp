#include "common.h"
// Never returns.
extern "C" int hr_run(const hr_call *) {
    for (volatile int i = 0;; i++) {}
}
