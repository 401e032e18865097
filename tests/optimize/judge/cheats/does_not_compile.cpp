#include "common.h"
extern "C" int hr_run(const hr_call *call) { return call->nonsense; }
