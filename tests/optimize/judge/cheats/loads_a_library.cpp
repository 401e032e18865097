#include "common.h"
// Looks for somebody who can do it.
extern "C" void *dlopen(const char *, int);
extern "C" int hr_run(const hr_call *) { return dlopen("libtorch_cpu.so", 1) ? HR_DONE : HR_NOT_MINE; }
