#include "plain.h"
enum { X, OUT };

extern "C" int hr_run(const hr_call *call) {
    const hr_tensor *t = call->tensors;
    write_rows(activate(read_rows(t[X]), t[X].shape[0], call->ints[0]), t[OUT]);
    return HR_DONE;
}
