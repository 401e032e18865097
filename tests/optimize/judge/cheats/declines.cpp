#include "common.h"
// Covers nothing.
extern "C" int hr_run(const hr_call *) { return HR_NOT_MINE; }
