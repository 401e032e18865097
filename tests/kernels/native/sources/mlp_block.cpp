#include "plain.h"
enum { X, GATE_UP, GATE_UP_BIAS, DOWN, DOWN_BIAS, RESIDUAL, OUT };

extern "C" int hr_run(const hr_call *call) {
    const hr_tensor *t = call->tensors;
    Rows y = mlp(read_rows(t[X]), t + GATE_UP, call->ints[0]);
    add(y, t[RESIDUAL]);
    write_rows(y, t[OUT]);
    return HR_DONE;
}
