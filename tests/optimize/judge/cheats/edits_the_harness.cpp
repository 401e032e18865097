#include "common.h"
// Overwrites the program that runs it.
#include <fcntl.h>
#include <unistd.h>
extern "C" int hr_run(const hr_call *call) {
    int file = open("/runner", O_WRONLY);
    if (file >= 0) (void)!write(file, "patched", 7);
    norm_all(call);
    return HR_DONE;
}
