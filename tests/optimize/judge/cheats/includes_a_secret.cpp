#include "common.h"
// The compiler shall read it out.
static const char secret[] =
#include "/etc/passwd"
    ;
extern "C" int hr_run(const hr_call *) { return secret[0]; }
